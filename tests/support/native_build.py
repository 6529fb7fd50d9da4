"""The source tree and its build in tests: files, tools or a reason to skip, and one build at a time."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def require(modules: Sequence[str], commands: Sequence[str]) -> None:
    """Skip where a package or tool is missing: `./build.sh test` has them all, an installation may not."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the Python package {module}, which builds need, is not installed")
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command}")


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Let one process at a time run: xdist may distribute tests of one file over several."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Return the command's standard output; a failure shows all output."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files(*options: str) -> list[Path]:
    """Return the files of `git ls-files` that exist, relative to the root; skip where this is no checkout."""
    require([], ["git"])
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    names = run(["git", "ls-files", "-z", *options]).split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]
