"""Which engines our plugins change: of the versions that they know, unless somebody says not to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from logging import Logger

__all__ = ["version_to_change"]


def version_to_change(name: str, known: Sequence[str], logger: Logger) -> str | None:
    """The version of the engine of this name, or None where nothing of it is to be changed.

    That is so where the environment has SPECDEC_<NAME>=0, and, with one warning, where the version is none of `known`;
    a label behind it, which says what it is built for, does not count.
    """
    if os.environ.get(f"SPECDEC_{name.upper()}") == "0":
        return None
    try:
        found = version(name.lower())
    except PackageNotFoundError:
        found = "of no known version"
    if found.partition("+")[0] in known:
        return found
    expected = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
    logger.warning("specdec: %s %s is not known, expected %s; nothing is changed", name, found, expected)
    return None
