"""The build backend that pip calls: scikit-build-core, with CUTLASS as a requirement if nvcc will compile.

`build-system.requires` cannot depend on nvcc, and a build for the CPU alone does not need CUTLASS's wheel.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import *  # noqa: F403

CUTLASS = "nvidia-cutlass>=4.2"  # its headers


def needs_cutlass() -> bool:
    """Return whether CMake will find a CUDA compiler, and SPECDEC_CUDA does not disable it."""
    wanted = os.environ.get("SPECDEC_CUDA", "ON").upper() not in ("OFF", "0", "NO", "FALSE")
    return wanted and ("CUDACXX" in os.environ or shutil.which("nvcc") is not None)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requires, CUTLASS] if needs_cutlass() else requires


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = scikit_build.get_requires_for_build_editable(config_settings)
    return [*requires, CUTLASS] if needs_cutlass() else requires
