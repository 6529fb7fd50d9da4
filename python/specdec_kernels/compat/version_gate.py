"""The check that a plugin runs first: change an engine only in the versions that the plugin is tested with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from logging import Logger

__all__ = ["version_to_change"]


def version_to_change(name: str, known: Sequence[str], logger: Logger) -> str | None:
    """Return the installed version of an engine, or None if the plugin must leave the engine alone.

    The plugin is off if the environment has SPECDEC_<NAME>=0, and, with one warning, if the version is not in `known`.
    A local version label (`+cu130`) is ignored.
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
