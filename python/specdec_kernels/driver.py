"""The NVIDIA driver of this machine, without torch."""

from __future__ import annotations

import subprocess


def driver_version() -> str | None:
    """Return the version that nvidia-smi prints, None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None
