"""What commands look for before they begin: optional packages, of which the base install has none, and files."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def require(command: str, extra: str, packages: list[str]) -> bool:
    """Whether all `packages` are installed; if not, says on stderr which are missing and what installs them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f'specdec {command} needs {" and ".join(missing)}: pip install "specdec-kernels[{extra}]"', file=sys.stderr
        )
    return not missing


def unwritable(file: str) -> str | None:
    """Why no file of this name can be written; None: it can."""
    path = Path(file).absolute()
    if not path.parent.is_dir():
        return "is in no existing folder"
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return "cannot be written, expected a file's name"
    return None
