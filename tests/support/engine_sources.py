"""Installed sources of other engines: tests read them, and import none."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest


def sources_of(engine: str, version: str) -> Path:
    """Return the folder next to an engine's package in a version; skip where there is none.

    SPECDEC_ENGINE_SOURCES lists folders that are searched before the path of Python, separated like that.
    """
    folders = [folder for folder in os.environ.get("SPECDEC_ENGINE_SOURCES", "").split(os.pathsep) if folder]
    for path in [*folders, *sys.path]:
        spec = PathFinder.find_spec(engine, [path])
        if spec is not None and spec.origin:
            folder = Path(spec.origin).parent.parent
            if list(folder.glob(f"{engine}-{version}*.dist-info")) or folder.name == f"{engine}-{version}":
                return folder
    pytest.skip(f"no sources of {engine} {version} here")
