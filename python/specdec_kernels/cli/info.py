"""`specdec info`: what is installed here, for a bug report or a first look, and how a model runs.

Without a model it needs the standard library only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from .optional_dependencies import require
from .table import print_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PACKAGES = ("torch", "transformers", "numpy", "rich")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "info",
        help="what is installed here: build, GPU, torch, ops; how a model runs",
        description="Says what is installed here: this package and its CUDA build, Python, torch, GPUs, and the ops. "
        "Paste it into a bug report. With a model: whether it runs, how each of its parts does, and why not.",
    )
    parser.add_argument("model", nargs="?", help="a folder or hub id: how this model runs; no weights are read")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        return run_model(args.model, args.json)
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0


def run_model(model: str, as_json: bool) -> int:
    """0, or 2 where the model is refused."""
    if not require("info MODEL", "engine", ["torch", "transformers", "safetensors"]):
        return 1
    facts = model_facts(model)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif facts["refused"]:
        print(f"specdec info: {facts['refused']}", file=sys.stderr)
    else:
        for name, value in facts.items():
            if value is not None:
                print(f"{name:<22}{value}")
    return 2 if facts["refused"] else 0


def model_facts(model: str) -> dict[str, Any]:
    """How an engine would run the model of a folder or hub id, as far as its config tells."""
    from ..models.language_model import Way, way_of
    from ..models.weights.checkpoint import expect_folder
    from ..models.weights.loading import config_of

    facts: dict[str, Any] = {"model": model, "model_type": None, **dict.fromkeys(Way._fields), "refused": None}
    try:
        expect_folder(model, "model")
        facts["model_type"] = config_of(model).model_type
        return facts | way_of(model)._asdict()
    except (OSError, ValueError) as error:
        return facts | {"refused": str(error)}


def collect() -> dict[str, Any]:
    import specdec_kernels as sd

    from ..ops._op_list import native_halves, public_ops

    versions = {name: installed_version(name) for name in PACKAGES}
    facts: dict[str, Any] = {
        "specdec_kernels": sd.__version__,
        "cuda_version": sd.cuda_version,
        "cuda_architectures": (sd.cuda_architectures or "").split(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "driver": driver_version(),
        "ops": {op: native_halves(op) for op in public_ops()},
    }
    return facts | (torch_facts() if versions["torch"] else {"dlpack_exchange_api": None, "devices": []})


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def torch_facts() -> dict[str, Any]:
    """What only torch itself can say; this is the one place that imports it."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken torch is exactly what a bug report should show
        return {"dlpack_exchange_api": None, "devices": [], "torch_import_error": str(error)}
    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            devices.append(
                {
                    "name": p.name,
                    "capability": f"{p.major}.{p.minor}",
                    "memory_gib": round(p.total_memory / 2**30, 1),
                }
            )
    return {"dlpack_exchange_api": hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), "devices": devices}


def show(facts: dict[str, Any]) -> None:
    build = "CPU only: built without nvcc"
    if facts["cuda_version"]:
        build = f"{facts['cuda_version']}, architectures {' '.join(facts['cuda_architectures'])}"
    exchange = {
        None: "unknown: torch is not here to ask",
        True: "yes",
        False: "no: tensors go through __dlpack__, microseconds each (torch 2.10 has it)",
    }
    devices = [f"{d['name']}, capability {d['capability']}, {d['memory_gib']} GiB" for d in facts["devices"]]
    lines = [
        ("specdec_kernels", facts["specdec_kernels"]),
        ("CUDA build", build),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("DLPack exchange API", exchange[facts["dlpack_exchange_api"]]),
        ("NVIDIA driver", facts["driver"] or "none found"),
        *((f"GPU {i}", text) for i, text in enumerate(devices)),
    ]
    if not devices:
        lines.append(("GPUs", "none that torch can use"))
    if "torch_import_error" in facts:
        lines.append(("torch does not import", facts["torch_import_error"]))
    for name, text in lines:
        print(f"{name:<22}{text}")
    print()
    rows = [
        [op, *("yes" if half in halves else "-" for half in ("cpu", "cuda"))] if halves else [op, "Python", "Python"]
        for op, halves in facts["ops"].items()
    ]
    print_table(["op", "cpu", "cuda"], rows)
