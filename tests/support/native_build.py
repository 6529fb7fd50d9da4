"""What tests need that run the build itself: its tools, or a reason to skip, and one build at a time."""

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
    """Skips where one is missing: `./build.sh test` has them all, an installation that is only used has not."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the Python package {module}, which builds need, is not installed")
    for command in commands:
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command}")


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """One process at a time: tests of one file may run in several."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], **environment: str) -> str:
    """The command's standard output; a failure shows all it wrote."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout
