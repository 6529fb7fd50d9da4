"""`specdec bench OP`: time ops on this machine, after their results were compared with the reference."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import CommandParser, add_flag, integers, words_of
from ..optional_dependencies import require
from ..progress import progress
from ..table import print_table
from . import modules
from .output import NO_CUDA, add_run_flags, compare, find_device, finish, refuse, refuse_files, show

if TYPE_CHECKING:
    from ..arguments import Subparsers

# Numeric parameters of all cases; each is an option.
NUMBERS = {
    "batch": "requests in a batch",
    "nodes": "nodes of a tree",
    "vocab": "size of the vocabulary",
    "k": "branches per draft step",
    "num_steps": "draft steps",
    "accept_width": "tokens of a round at most",
    "candidates": "nodes of a trellis",
    "depth": "positions of a trellis",
    "rank": "factors of a trellis' transitions (0: none)",
    "prefix": "tokens before the tree",
    "page_size": "KV rows per page",
    "heads": "query heads over latent rows",
    "rows": "rows; of rope_qkv_write_kv and write_kv per request",
    "width": "elements of a row",
    "q_width": "elements of a row before the latent ones",
    "outs": "output elements of a row of a linear layer",
    "experts": "experts of a layer",
    "top_k": "experts per token",
    "inner": "intermediate elements of an expert",
    "layers": "layers of KV",
    "top_n": "alternatives scored for each token",
    "held": "tokens in the n-gram index",
    "max_len": "KV rows that page tables have room for (0: those of the text)",
}
MAY_BE_ZERO = ("prefix", "top_n", "held", "max_len", "rank")
HIDDEN = {"top_k": ("--taken",)}  # earlier spellings
# Parameters that are words, and their values.
WORDS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "lengths": ("even", "uneven"),
    "kv": ("same", "fp8"),
    "mode": ("tree", "chain"),
    "moves": ("tree", "none"),
    "recurrence": ("gated-delta", "mamba2", "kda"),
    "weights": ("fp8", "fp8-rows", "int4"),
    "sampling": ("greedy", "top_k+top_p", "top_p", "temperature"),
    "edit": ("none", "penalties", "mask"),
    "product": ("queries", "outputs"),
}

OF_MEASUREMENTS = (*NUMBERS, *WORDS, "json", "quick", "full", "between_layers", "device")  # flags

EPILOG = """\
benchmarks:
  OP ...                  time ops; `all`: every op; `specdec bench` lists them with their parameters
  FILE.json               print a recorded run, plot it (--plot), compare it (--baseline)
  round                   rounds of the engine on synthetic models
  forward                 the target's forward pass, and its GEMMs alone
  ngram-replay            drafts of the n-gram index on a text
  engines                 this engine, SGLang and vLLM on the same checkpoints
  server                  a server, and the engine that it serves
  report, headline        the page of benchmarks and the chart of README, from recorded runs
  `specdec bench <benchmark> --help` explains each.

sizes:
  An op has its own sizes: every combination of them, or, if that takes too long, one size with one parameter varied at
  a time (--full: every combination). A parameter that you name takes your values instead, in all combinations:
    specdec bench verify_tree --batch 1,4,16,64,256 --nodes 32 --vocab 128256 --plot verify.png
    specdec bench build_tree --nodes 8,32,64 --k 10
    specdec bench all --quick

columns:
  time      median time of a call; on a GPU from replays of a CUDA graph, on a CPU wall time
  between others
            with --between-layers: median time of a call between the other kernels of a decoder layer, as in a model,
            where code and parameters are cold; a star as for p90
  p90       nine of ten samples are at or below it; a star: far above the median, something else ran
  host      on a GPU: how long the call keeps the host busy; the minimum
  floor     bytes that the op must move over the bandwidth measured first (or arithmetic over its rate, if larger)
  of floor  floor / time: 100 % cannot be beaten with cold memory
  inputs    cold: rotated through more memory than the L2 cache holds
  baselines a column for each, two with --between-layers: torch and installed packages (sglang, flashinfer), checked
            and timed in the same way; in brackets its time over ours

baseline:
  --baseline FILE compares with an earlier run's --json: tokens per second of round, the time of an op.
    specdec bench select_topk --json before.json
    specdec bench select_topk --baseline before.json --threshold 10
    specdec bench after.json --baseline before.json

exit code: 0; 1 if a result was wrong (it is named and not timed) or slower than --baseline by more than --threshold;
2 if the command cannot run here, or a size could not be timed (it is named).
"""


def add_parser(subparsers: Subparsers) -> CommandParser:
    """Add the parser of `specdec bench` and return it."""
    parser = subparsers.add_parser(
        "bench",
        help="time ops, rounds, engines and servers on this machine; results are checked first",
        description="Time ops on this machine. Each result is compared with the reference first; a wrong one is not "
        "timed. Without an op: list them.",
        usage="specdec bench [op ...] [options]\n       specdec bench <benchmark> [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "ops", metavar="op", nargs="*", help="ops to time, `all`, or a record FILE.json; none: list ops"
    )
    add_run_flags(parser)
    parser.add_argument(
        "--between-layers",
        action="store_true",
        help="also time each op between the other kernels of a decoder layer, as in a model (on a GPU)",
    )
    parser.add_argument("--full", action="store_true", help="every combination of an op's sizes")
    sizes = parser.add_argument_group("sizes, comma-separated")
    for name, meaning in NUMBERS.items():
        kind = integers(0 if name in MAY_BE_ZERO else 1)
        add_flag(sizes, option(name), *HIDDEN.get(name, ()), type=kind, metavar="N", help=meaning)
    for name, words in WORDS.items():
        sizes.add_argument(option(name), type=words_of(words), metavar="NAME", help=", ".join(words))
    parser.set_defaults(run=run, benchmarks=parser.commands)
    return parser


def option(parameter: str) -> str:
    """Return the flag of a parameter."""
    return "--" + parameter.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("bench", "bench", ["torch", "rich"]):
        return 2
    cases, overhead = modules.cases.CASES, modules.call_overhead
    if args.quick and args.full:
        return refuse("--quick is set, expected not with --full")
    if not args.ops:
        if args.baseline:
            return refuse(f"--baseline {args.baseline} needs an op or a recorded run to compare")
        if flag := first_given(args, *OF_MEASUREMENTS, "plot", "threshold"):
            return refuse(f"{flag}, expected not without an op")
        list_ops(cases, overhead.NAME)
        return 0
    if (code := refuse_files(args)) is not None:
        return code
    if len(args.ops) == 1 and args.ops[0].endswith(".json"):
        return show_recorded(args)
    if misplaced := [name for name in args.ops if name in args.benchmarks]:
        return refuse(f"{misplaced[0]} is no op, expected it first: specdec bench {misplaced[0]}")
    names = [*cases, overhead.NAME] if args.ops == ["all"] else args.ops
    known = [*cases, overhead.NAME]
    for name in names:
        if name == "all":
            return refuse("all means every op, expected no other op")
        if name not in known:
            return refuse(f"there is no op {name}, expected one of {', '.join(known)}, or all")
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA)
    if args.between_layers and device.type != "cuda":
        return refuse(f"--between-layers times CUDA graphs, expected a GPU, not {device.type}")

    chosen = {name: getattr(args, name) for name in (*NUMBERS, *WORDS) if getattr(args, name) is not None}
    try:
        plan = plan_of(names, cases, device, chosen, quick=args.quick, full=args.full)
    except ValueError as error:
        return refuse(str(error))
    return measure(args, plan, overhead if overhead.NAME in names else None, device)


def show_recorded(args: argparse.Namespace) -> int:
    """Print an earlier run, plot it and compare it."""
    try:
        run_record = modules.record.read_record(args.ops[0])
    except (OSError, ValueError) as error:
        return refuse(str(error))
    if flag := first_given(args, *OF_MEASUREMENTS):
        return refuse(f"{flag}, expected not with a recorded run")
    show(run_record)
    if args.plot:
        modules.plot.plot(run_record, args.plot)
    return compare(args, run_record)


def first_given(args: argparse.Namespace, *names: str) -> str:
    """Return the first flag of these that is given, for an error; "" if none is."""
    for name in names:
        if (value := getattr(args, name)) not in (None, False):
            return f"{option(name)} is {'set' if value is True else 'given'}"
    return ""


def list_ops(cases: dict[str, Any], overhead: str) -> None:
    """Print all ops with their parameters."""
    rows = [[op, ", ".join(case.grid)] for op, case in cases.items()]
    rows.append([overhead, "time of a call at the Python boundary"])
    print_table(["op", "parameters"], rows, left=2)
    print("Time one with `specdec bench <op>`; `--quick` for the smallest size only.")


def plan_of(
    names: Sequence[str], cases: dict[str, Any], device: Any, chosen: dict[str, Any], *, quick: bool, full: bool
) -> list[tuple[Any, dict[str, Any]]]:
    """Return each case and size to measure. Of several ops, a chosen value applies to those with its parameter."""
    known = [cases[name] for name in names if name in cases]
    for name in chosen:
        if len(known) != 1 and not any(name in case.grid for case in known):
            raise ValueError(f"none of these ops has {name}")
    plan = []
    for case in known:
        if device.type not in case.devices:
            if len(names) == 1:
                raise ValueError(f"{case.op} runs on {' or '.join(case.devices)}, not on {device.type}")
            continue
        mine = chosen if len(known) == 1 else {key: value for key, value in chosen.items() if key in case.grid}
        plan += [(case, params) for params in case.sizes(device, quick, full, **mine)]
    return plan


def measure(args: argparse.Namespace, plan: list[tuple[Any, dict[str, Any]]], overhead: Any, device: Any) -> int:
    """Measure a plan and return the exit code."""
    harness, params_text = modules.harness, modules.tables.params_text
    results, ceilings = [], None
    with progress(len(plan) + 1) as advance:
        if plan:
            ceilings = modules.ceilings.measure_ceilings(device, args.quick)
            for case, params in plan:
                advance(f"{case.op} {params_text(params)}")
                results.append(harness.measure(case, params, device, ceilings, between_layers=args.between_layers))
        if overhead is not None:
            advance(overhead.NAME)
            results += overhead.measure_calls(device, args.quick)

    return finish(args, results, device, ceilings)
