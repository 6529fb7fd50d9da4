"""The build backend that pip calls: scikit-build-core, which also asks for CUTLASS where nvcc will compile.

`build-system.requires` cannot say "where nvcc is", and CUTLASS's wheel is of no use to a build for the CPU alone.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import *  # noqa: F403

CUTLASS = "nvidia-cutlass>=4.2"  # its headers


def needs_cutlass() -> bool:
    """Whether CMake will find a CUDA compiler and has not been told to leave it alone."""
    wanted = os.environ.get("SPECDEC_CUDA", "ON").upper() not in ("OFF", "0", "NO", "FALSE")
    return wanted and ("CUDACXX" in os.environ or shutil.which("nvcc") is not None)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requires, CUTLASS] if needs_cutlass() else requires


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = scikit_build.get_requires_for_build_editable(config_settings)
    return [*requires, CUTLASS] if needs_cutlass() else requires
