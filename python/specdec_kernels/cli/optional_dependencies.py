"""Guards of commands: optional packages, which the base install lacks, output files, and errors of the engine."""

from __future__ import annotations

import argparse
import importlib.util
import os
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
        print(f"specdec {command}: {error}", file=sys.stderr)
        return 2


def unwritable(file: str) -> str | None:
    """Return why a file cannot be written, None if it can."""
    path = Path(file).absolute()
    if not path.parent.is_dir():
        return "is in no existing folder"
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return "cannot be written, expected a file's name"
    return None
