"""Records of runs as JSON: machine, versions, ceilings, and one object per result. Times are in microseconds."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sd
from specdec_kernels.driver import driver_version

from ..ops.ceilings import Ceilings
from ..ops.harness import Result

SCHEMA = 2  # of a record; bench/results/README.md describes it
# Names in earlier records, and today's.
RENAMED_PARAMS = {"taken": "top_k"}


def record(results: list[Result], device: torch.device, ceilings: Ceilings | None, command: str) -> dict[str, Any]:
    """Return the record of a run."""
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


def read_record(file: str | Path) -> dict[str, Any]:
    """Read a record, with today's names of parameters.

    Raises:
        OSError, ValueError: the file is no record.
    """
    try:
        run = json.loads(Path(file).read_text())
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON, expected a run that --json wrote") from error
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"{file} is no run of schema {SCHEMA}, expected one that --json wrote")
    for result in run["results"]:
        result["params"] = {RENAMED_PARAMS.get(name, name): value for name, value in result["params"].items()}
    return run


def write_record(run: dict[str, Any], file: str | Path) -> None:
    """Write a record as JSON."""
    Path(file).write_text(json.dumps(run, indent=1) + "\n")


def line(r: Result) -> dict[str, Any]:
    """Return a result as JSON."""
    between = {
        "between_us": micro(r.between.median if r.between else None),
        "between_p90_us": micro(r.between.p90 if r.between else None),
        "between_baselines": {name: micro(times.median) for name, times in r.between_baselines.items()},
    }
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
        **(between if any(between.values()) else {}),
        **({"facts": dict(r.facts)} if r.facts else {}),
        **({"profile": asdict(r.profile)} if r.profile is not None else {}),
    }


def micro(seconds: float | None) -> float | None:
    """Return microseconds."""
    return None if seconds is None else round(seconds * 1e6, 4)


def commit() -> str | None:
    """Return the commit of the source tree that this package runs from, marked `-dirty` if files differ from it.

    A wheel does not know its commit: it is SPECDEC_COMMIT if that is set, else None.
    """
    if given := os.environ.get("SPECDEC_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / "csrc").is_dir():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        for entry in Path("/proc/cpuinfo").read_text().splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
