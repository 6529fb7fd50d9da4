"""The optional packages of a command: the base install has none."""

from __future__ import annotations

import importlib.util
import sys


def require(command: str, extra: str, packages: list[str]) -> bool:
    """Whether all `packages` are installed; if not, says on stderr which are missing and what installs them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f'specdec {command} needs {" and ".join(missing)}: pip install "specdec-kernels[{extra}]"', file=sys.stderr
        )
    return not missing
