"""Guards of commands: optional packages, which the base install lacks, output files, and errors of the engine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path


def require(command: str, extra: str, packages: list[str]) -> bool:
    """Return whether all `packages` are installed; print which are missing and how to install them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f'specdec {command} needs {" and ".join(missing)}: pip install "specdec-kernels[{extra}]"', file=sys.stderr
        )
    return not missing


def guarded(command: str, function: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command's function; if the engine refuses something, print its message and return 2."""
    try:
        return function(args)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"specdec {command}: {in_flags(error, args)}", file=sys.stderr)
        return 2


def in_flags(error: Exception, args: argparse.Namespace) -> str:
    """Return an error's message in a line, with the flag for an option of the engine, its draft or the sampling."""
    from .engine_flags import FLAGS

    flags = {flag.option: name for name, flag in FLAGS.items()}
    flags |= {"adaptive": "--speculative-adaptive", "num_steps": "--speculative-num-steps"}
    flags |= {"topk": "--speculative-eagle-topk", "num_nodes": "--speculative-num-draft-tokens"}
    flags["corpus"] = "--speculative-ngram-corpus"
    message = " ".join(str(error).split("\n"))
    if found := re.match(r"(Engine|SamplingParams|[A-Z]\w+): (\w+)(?= is )", message):
        of_sampling = "--" + found[2].replace("_", "-") if found[1] == "SamplingParams" else ""
        flag = flags.get(found[2], of_sampling)
        if flag and getattr(args, flag.removeprefix("--").replace("-", "_"), None) is not None:
            return flag + message[found.end() :]
    return message


def unwritable(file: str | Path) -> str | None:
    """Return why a file cannot be written, None if it can."""
    path = Path(os.path.realpath(file))
    if not path.parent.is_dir():
        return "is in no existing folder"
    try:
        if path.is_file() or not path.exists():
            is_new = not path.exists()
            path.open("ab").close()  # permissions alone do not tell: there are read-only file systems
            if is_new:
                path.unlink()
        elif path.is_dir() or not os.access(path, os.W_OK):
            raise OSError
    except OSError:
        return "cannot be written, expected a file's name"
    return None
