"""Checks before a command starts: optional packages, none of which the base install has, and output files."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def require(command: str, extra: str, packages: list[str]) -> bool:
    """Return whether all `packages` are installed; print which are missing and how to install them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f'specdec {command} needs {" and ".join(missing)}: pip install "specdec-kernels[{extra}]"', file=sys.stderr
        )
    return not missing


def unwritable(file: str) -> str | None:
    """Return why a file cannot be written, None if it can."""
    path = Path(file).absolute()
    if not path.parent.is_dir():
        return "is in no existing folder"
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return "cannot be written, expected a file's name"
    return None
