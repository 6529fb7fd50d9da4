"""A run as JSON: what ran where and when, the ceilings, one object per line of the table. Times in microseconds."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sd
from specdec_kernels.cli.bench import SCHEMA
from specdec_kernels.cli.info import driver_version

from ..ops.ceilings import Ceilings
from ..ops.harness import Result


def record(results: list[Result], device: torch.device, ceilings: Ceilings | None, command: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "specdec_kernels": {"version": sd.__version__, "commit": commit(), "cuda": sd.cuda_version},
        "machine": {
            "device": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
            "driver": driver_version() if device.type == "cuda" else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "ceilings": None
        if ceilings is None
        else {
            "copy_gb_s": round(ceilings.copy_bytes_per_second / 1e9, 2),
            "read_gb_s": round(ceilings.read_bytes_per_second / 1e9, 2),
            "tflop_s": round(ceilings.flops_per_second / 1e12, 3),
        },
        "results": [line(result) for result in results],
    }


def line(r: Result) -> dict[str, Any]:
    return {
        "op": r.op,
        "params": r.params,
        "error": r.error,
        "skipped": r.skipped,
        "time_us": micro(r.time.median if r.time else None),
        "p90_us": micro(r.time.p90 if r.time else None),
        "host_us": micro(r.host.best if r.host else None),
        "floor_us": micro(r.floor),
        "of_floor": r.of_floor and round(r.of_floor, 4),
        "bytes": r.bytes_moved,
        "flops": r.flops,
        "cold": r.cold,
        "baselines": {name: micro(times.median) for name, times in r.baselines.items()},
    } | ({"facts": dict(r.facts)} if r.facts else {})


def micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 4)


def commit() -> str | None:
    """The commit of the source tree this package runs from, with a mark when files differ from it.

    A wheel does not know its commit: whoever measures one says so in SPECDEC_COMMIT; else it is None.
    """
    if told := os.environ.get("SPECDEC_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[2]
    if not (root / "csrc").is_dir():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    try:
        for entry in Path("/proc/cpuinfo").read_text().splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
