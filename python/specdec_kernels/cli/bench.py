"""`specdec bench`: times an op on this machine, after checking its result against the reference."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .extras import require
from .table import print_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DTYPES = ("float32", "float16", "bfloat16")
PATIENCE_SECONDS = 2.0

EPILOG = """\
columns:
  time      median time of a call; on a GPU from replays of a CUDA graph, on a CPU wall time
  p90       nine of ten samples are at or below it
  host      on a GPU: how long the call keeps the host; the least seen
  floor     bytes the op must move over the bandwidth measured here first (or arithmetic over its rate, if larger)
  of floor  floor / time: 100 % cannot be beaten by memory that is cold
  inputs    cold: rotated through more memory than the L2 cache holds
  baseline  another way to the same result, checked as well; the last column is its time over ours

exit code: 0; 1 when a result was wrong (it is named and has no time); 2 when the command cannot run here.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time one op on this machine, checked against its reference first",
        description="Times ops on this machine. Each result is checked against the reference first; a wrong one gets "
        "no time. Without an op: lists them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ops", metavar="op", nargs="*", help="which to time, or `all`; none lists them")
    parser.add_argument("--batch", type=numbers, help="batch sizes, such as 1,8,64")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", type=dtypes, help=f"of {', '.join(DTYPES)}; several with commas")
    parser.add_argument("--json", metavar="FILE", help="write the run to FILE as well")
    parser.add_argument("--quick", action="store_true", help="the smallest size only")
    parser.set_defaults(run=run)


def numbers(text: str) -> list[int]:
    values = [int(item) for item in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
    return values


def dtypes(text: str) -> list[str]:
    values = text.split(",")
    for value in values:
        if value not in DTYPES:
            raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(DTYPES)}")
    return values


def run(args: argparse.Namespace) -> int:
    if not require("bench", "bench", ["torch", "rich"]):
        return 2
    # The harness lives in bench/ of the source tree and is part of the package only once installed.
    cases = import_module("specdec_kernels.bench.cases").CASES
    overhead = import_module("specdec_kernels.bench.call_overhead")
    if not args.ops:
        list_ops(cases, overhead.NAME)
        return 0
    names = [*cases, overhead.NAME] if args.ops == ["all"] else args.ops
    for name in names:
        if name not in cases and name != overhead.NAME:
            return refuse(f"there is no op {name}, expected one of {', '.join([*cases, overhead.NAME])}")
    if args.json and not Path(args.json).absolute().parent.is_dir():  # said before the run, not behind it
        return refuse(f"--json {args.json} is in no existing folder")
    device = find_device(args.device)
    if device is None:
        return refuse("--device cuda needs a CUDA build of specdec_kernels and a GPU that torch can use")

    chosen = {name: getattr(args, name) for name in ("batch", "dtype") if getattr(args, name) is not None}
    try:
        plan = plan_of(names, cases, device, args.quick, chosen)
    except ValueError as error:
        return refuse(str(error))
    return bench(args, plan, overhead if overhead.NAME in names else None, device)


def refuse(message: str) -> int:
    print(f"specdec bench: {message}", file=sys.stderr)
    return 2


def list_ops(cases: dict[str, Any], overhead: str) -> None:
    rows = [[op, ", ".join(case.grid)] for op, case in cases.items()]
    print_table(["op", "parameters"], [*rows, [overhead, "what a call costs at the Python boundary"]], left=2)
    print("Time one with `specdec bench <op>`; `--quick` for the smallest size only.")


def find_device(wanted: str | None) -> Any:
    import torch

    import specdec_kernels

    has_cuda = specdec_kernels.cuda_version is not None and torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        return None
    return torch.device(wanted or ("cuda" if has_cuda else "cpu"))


def plan_of(
    names: Sequence[str], cases: dict[str, Any], device: Any, quick: bool, chosen: dict[str, Any]
) -> list[tuple[Any, dict[str, Any]]]:
    """Every (case, size) to measure. With several ops, a choice applies to those that have it."""
    plan = []
    for name in names:
        if name not in cases:
            continue
        case = cases[name]
        if device.type not in case.devices:
            if len(names) == 1:
                raise ValueError(f"{name} runs on {' or '.join(case.devices)}, not on {device.type}")
            continue
        mine = chosen if len(names) == 1 else {key: value for key, value in chosen.items() if key in case.grid}
        plan += [(case, params) for params in case.sizes(device, quick, **mine)]
    return plan


def bench(args: argparse.Namespace, plan: list[tuple[Any, dict[str, Any]]], overhead: Any, device: Any) -> int:
    harness = import_module("specdec_kernels.bench.harness")
    ceilings_of = import_module("specdec_kernels.bench.ceilings").measure_ceilings
    recorder = import_module("specdec_kernels.bench.record")

    results, ceilings = [], None
    with progress(len(plan) + 1) as advance:
        if plan:
            ceilings = ceilings_of(device, args.quick)
        for case, params in plan:
            advance(f"{case.op} {text_of(params)}")
            results.append(harness.measure(case, params, device, ceilings))
        if overhead is not None:
            advance(overhead.NAME)
            results += overhead.measure_calls(device, args.quick)

    run_record = recorder.record(results, device, ceilings, args.command_line)
    show(run_record)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(run_record, file, indent=1)
            file.write("\n")
    wrong = [result for result in results if result.error]
    for result in wrong:
        print(f"wrong result, not timed: {result.op} {text_of(result.params)}: {result.error}", file=sys.stderr)
    return 1 if wrong else 0


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time left, on a terminal, for a run that lasts longer than PATIENCE_SECONDS."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("measuring the device", total=total)
    start = threading.Timer(PATIENCE_SECONDS, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda what: bar.update(task, description=what, advance=1)
    finally:
        start.cancel()
        start.join()
        bar.stop()


def show(run_record: dict[str, Any]) -> None:
    machine, package = run_record["machine"], run_record["specdec_kernels"]
    hardware = machine["name"] + (f", driver {machine['driver']}" if machine["driver"] else "")
    ours = package["version"] + (f" ({package['commit']})" if package["commit"] else "")
    print(f"{hardware}, torch {machine['torch']}, specdec_kernels {ours}, {run_record['date']}")
    ceilings = run_record["ceilings"]
    if ceilings:
        bandwidth = f"copy {ceilings['copy_gb_s']} GB/s, read {ceilings['read_gb_s']} GB/s"
        print(f"measured here: {bandwidth}, matrix product {ceilings['tflop_s']} Tflop/s")

    calls = [r for r in run_record["results"] if "call" in r["params"]]
    ops = [r for r in run_record["results"] if "call" not in r["params"]]
    if ops:
        columns = [
            "op",
            "size",
            "time us",
            "p90 us",
            "host us",
            "floor us",
            "of floor",
            "inputs",
            "baseline",
            "us",
            "ratio",
        ]
        print_table(columns, [row(r) for r in ops], left=2)
    if calls:
        print_table(["call", "ns"], [[r["params"]["call"], f"{r['host_us'] * 1e3:.0f}"] for r in calls])


def row(r: dict[str, Any]) -> list[str]:
    if r["error"]:
        return [r["op"], text_of(r["params"]), "WRONG", *[""] * 8]
    return [
        r["op"],
        text_of(r["params"]),
        number(r["time_us"]),
        number(r["p90_us"]),
        number(r["host_us"]),
        number(r["floor_us"]),
        f"{r['of_floor']:.0%}" if r["of_floor"] else "",
        "cold" if r["cold"] else "warm",
        r["baseline"] or "",
        number(r["baseline_us"]),
        f"{r['baseline_us'] / r['time_us']:.2f}x" if r["baseline_us"] and r["time_us"] else "",
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def text_of(params: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())
