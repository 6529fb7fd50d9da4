"""`specdec info`: what is installed, for a bug report or a first look, and how a model would run.

Without a model it needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

from ..smollm2 import model_path
from .arguments import add_model, at_least, model_of
from .optional_dependencies import require
from .table import print_table

if TYPE_CHECKING:
    from ..compat.version_gate import Takeover
    from .arguments import Subparsers

PACKAGES = ("torch", "transformers", "numpy", "rich")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "info",
        help="show what is installed: build, GPU, torch, ops; or how a model would run",
        description="Show what is installed: this package and its CUDA build, Python, torch, other engines and what "
        "the plugins would take over there, GPUs, and the ops. Paste it into a bug report. With a model: show whether "
        "and how each of its parts would run, and if not, why.",
    )
    add_model(parser, ", whose config alone is read (default: show what is installed)")
    parser.add_argument(
        "--speculative-draft-model-path",
        metavar="PATH",
        help="draft of the model, whose config alone is read: show what an engine keeps for it",
    )
    parser.add_argument(
        "--tp", type=at_least(1), metavar="N", help="show what each of N GPUs holds if the model is divided among them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        given = model_of(args)
        model = given and model_path(given)
    except ValueError as error:
        print(f"specdec info: {error}", file=sys.stderr)
        return 2
    if model:
        return run_model(str(model), args.json, args.speculative_draft_model_path, args.tp)
    for flag, value in (("--speculative-draft-model-path", args.speculative_draft_model_path), ("--tp", args.tp)):
        if value is not None:
            print(f"specdec info: {flag} is given, expected a model too", file=sys.stderr)
            return 2
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0


def run_model(model: str, as_json: bool, draft: str | None = None, tp: int | None = None) -> int:
    """Print how a model would run, and what its draft and a rank take; return 2 if one is refused, else 0."""
    if not require("info MODEL", "engine", ["torch", "transformers", "safetensors"]):
        return 2
    facts = model_facts(model)
    if draft is not None and not facts["refused"]:
        facts |= draft_facts(model, draft)
    if tp is not None and not facts["refused"]:
        facts |= rank_facts(model, tp)
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
    """Return how an engine would run the model of a folder or hub id, as far as its config tells."""
    from ..models.backends.select import BackendSummary, summarize_backend
    from ..models.weights.checkpoint import expect_folder
    from ..models.weights.model_config import config_of

    facts: dict[str, Any] = {
        "model": model,
        "model_type": None,
        **dict.fromkeys(BackendSummary._fields),
        "refused": None,
    }
    try:
        expect_folder(model, "model")
        facts["model_type"] = config_of(model).model_type
        return facts | summarize_backend(model)._asdict()
    except (OSError, ValueError) as error:
        return facts | {"refused": str(error)}


def draft_facts(model: str, path: str) -> dict[str, Any]:
    """Return what an engine keeps for the draft of a folder or hub id, as far as its config tells."""
    from ..models.weights.checkpoint import local_folder
    from ..models.weights.model_config import config_of
    from .algorithms import algorithm_of, draft_class

    try:
        algorithm = algorithm_of(local_folder(model_path(path), "--speculative-draft-model-path"))
        needs = draft_class(algorithm)(model_path(path)).needs(config_of(model))
    except (OSError, ValueError) as error:
        return {"refused": str(error)}
    elements, windows = needs.kv_numbers, [window for window in needs.kv_windows if window is not None]
    rows = "all rows"
    if windows:
        some = " in some layers" if None in needs.kv_windows else ""
        rows = f"the last {', '.join(map(str, windows))} rows{some}, all of them with a prefix cache"
    return {
        "draft": f"{algorithm}, at most {needs.accept_width - 1} tokens on a path and {needs.num_nodes} nodes",
        "draft_kv": f"{2 * elements} bytes for each token in 16 bits, {elements} in 8; {rows}",
    }


def rank_facts(model: str, tp: int) -> dict[str, Any]:
    """Return what each of `tp` ranks holds of the model of a folder or hub id, as far as its config tells."""
    import torch

    from ..models.backends.share import share_of
    from ..parallel.symmetric import why_not

    try:
        whole, one = share_of(model, 1), share_of(model, tp)
    except (OSError, ValueError) as error:
        return {"refused": str(error)}
    weights = "not known from the config of a quantized checkpoint"
    if one.weights is not None and whole.weights is not None:
        weights = f"{one.weights / 1e9:.3g} GB of {whole.weights / 1e9:.3g} GB"
    state = f"{one.state / 1e6:.1f} MB a request or a snapshot, and {one.state_of_node / 1e6:.2f} MB for each node"
    fits = reductions = None
    if torch.cuda.is_available():
        if torch.cuda.device_count() >= tp > 1:
            reason = why_not(range(tp))
            reductions = f"NCCL ({reason})" if reason else "kernels, or NCCL with --disable-custom-all-reduce"
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        tokens = one.tokens(memory, 2)
        fits = tokens and f"KV of {tokens} tokens in 16 bits on {memory / 1e9:.0f} GB, without all else"
    return {
        "ranks": tp,
        "rank_weights": weights,
        "rank_kv": f"{2 * one.kv_elements} bytes for each token in 16 bits of {2 * whole.kv_elements}, half in 8",
        "rank_states": state if one.state else None,
        "rank_fits": fits,
        "rank_reductions": reductions,
    }


def collect() -> dict[str, Any]:
    """Return what is installed."""
    import specdec_kernels as sd

    from ..compat.installed import installed_engines, installed_version
    from ..driver import driver_version
    from ..ops._op_list import native_halves, public_ops

    versions = {name: installed_version(name) for name in PACKAGES}
    facts: dict[str, Any] = {
        "specdec_kernels": sd.__version__,
        "cuda_version": sd.cuda_version,
        "cuda_architectures": (sd.cuda_architectures or "").split(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "engines": {name: takeover and engine_facts(takeover) for name, takeover in installed_engines().items()},
        "driver": driver_version(),
        "ops": {op: native_halves(op) for op in public_ops()},
    }
    return facts | (torch_facts() if versions["torch"] else {"dlpack_exchange_api": None, "devices": []})


def engine_facts(takeover: Takeover) -> dict[str, Any]:
    """Return what a plugin would take over in an engine, and why not the rest."""
    return {
        "version": takeover.found,
        "tested": takeover.is_tested,
        "takes_over": list(takeover.parts),
        "left": takeover.left,
        "reason": takeover.reason,
    }


def engine_line(engine: dict[str, Any] | None) -> str:
    """Return the facts of an engine in one line."""
    if engine is None:
        return "not installed"
    untested = "" if engine["tested"] or not engine["takes_over"] else ", untested"
    left = "".join(f"; not {part}: {reason}" for part, reason in engine["left"].items())
    reason = f" ({engine['reason']})" if engine["reason"] and not left else ""
    return f"{engine['version']}{untested}, gets {', '.join(engine['takes_over']) or 'nothing'}{left}{reason}"


def torch_facts() -> dict[str, Any]:
    """Return what only torch knows; nothing else in this command imports it."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a bug report should show that torch is broken
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
    """Print what is installed."""
    build = "CPU only: built without nvcc"
    if facts["cuda_version"]:
        build = f"{facts['cuda_version']}, architectures {' '.join(facts['cuda_architectures'])}"
    exchange = {
        None: "unknown without torch",
        True: "yes",
        False: "no: tensors go through __dlpack__, microseconds each (torch 2.10 has it)",
    }
    devices = [f"{d['name']}, capability {d['capability']}, {d['memory_gib']} GiB" for d in facts["devices"]]
    lines = [
        ("specdec_kernels", facts["specdec_kernels"]),
        ("CUDA build", build),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        *(
            (name, version or "not installed")
            for name, version in facts["packages"].items()
            if name not in facts["engines"]
        ),
        *((name, engine_line(engine)) for name, engine in facts["engines"].items()),
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
