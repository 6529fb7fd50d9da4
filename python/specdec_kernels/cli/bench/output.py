"""Shared parts of benchmarks: flags of a run, its table, record, plot, and comparison with an earlier run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...synthetic.names import DOMAINS, DRAFTERS, SHAPES
from ..arguments import at_least
from ..optional_dependencies import require, unwritable
from ..table import print_table
from . import modules

THRESHOLD = 5.0  # percent
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
NO_CUDA = "--device cuda needs a CUDA build of specdec_kernels and a GPU that torch can use"


def add_device(parser: argparse._ActionsContainer) -> None:
    """Add `--device`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a synthetic target and its drafts."""
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="shape of the target (qwen3-8b)")
    parser.add_argument(
        "--acceptance", choices=DOMAINS, default="code", help="texts whose acceptance the drafts have (code)"
    )
    parser.add_argument(
        "--drafter", choices=DRAFTERS, default="eagle3", help="published drafter whose acceptance they have (eagle3)"
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", metavar="FILE", help="write the record of the run to FILE")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of benchmarks whose results can be plotted and compared."""
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="the smallest size only")
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="plot the results into FILE (.png, .svg or .pdf)")
    parser.add_argument("--baseline", metavar="FILE", help="compare with the record that --json wrote there")
    parser.add_argument(
        "--threshold",
        type=at_least(0.0),
        metavar="PERCENT",
        help="a result is slower than the baseline if it takes this much longer (5)",
    )


def refuse(message: str, command: str = "bench") -> int:
    """Print why a command cannot run and return its exit code."""
    print(f"specdec {command}: {message}", file=sys.stderr)
    return 2


def refuse_files(args: argparse.Namespace, command: str = "bench") -> int | None:
    """Return the exit code if files of the run cannot be read or written; reads the baseline."""
    if getattr(args, "threshold", None) is not None and not args.baseline:
        return refuse(f"--threshold is {args.threshold:g}, expected none without --baseline", command)
    for flag in ("json", "plot"):
        file = getattr(args, flag, None)
        if file and (why := unwritable(file)):
            return refuse(f"--{flag} {file} {why}", command)
    if getattr(args, "baseline", None):
        try:
            args.baseline_run = modules.record.read_record(args.baseline)
        except (OSError, ValueError) as error:
            return refuse(f"--baseline {error}", command)
    if getattr(args, "plot", None):
        if not require("bench --plot", "bench", ["matplotlib"]):
            return 2
        if Path(args.plot).suffix not in PLOT_SUFFIXES:
            return refuse(f"--plot {args.plot} is no picture, expected a name in {' or '.join(PLOT_SUFFIXES)}", command)
    return None


def find_device(wanted: str | None) -> Any:
    """Return the torch device to run on, None if CUDA is wanted and absent."""
    import torch

    import specdec_kernels

    has_cuda = specdec_kernels.cuda_version is not None and torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        return None
    return torch.device(wanted or ("cuda" if has_cuda else "cpu"))


def finish(args: argparse.Namespace, results: list[Any], device: Any, ceilings: Any, command: str = "bench") -> int:
    """Print, record, plot and compare what was measured; return the exit code."""
    record = modules.record
    run = record.record(results, device, ceilings, args.command_line)
    show(run)
    if args.json:
        record.write_record(run, args.json)
    if args.plot:
        modules.plot.plot(run, args.plot)
    slower = compare(args, run, command)
    params_text = modules.tables.params_text
    wrong = [result for result in results if result.error]
    for result in wrong:
        print(f"wrong result, not timed: {result.op} {params_text(result.params)}: {result.error}", file=sys.stderr)
    skipped = [result for result in results if result.skipped]
    for result in skipped:
        print(f"not timed: {result.op} {params_text(result.params)}: {result.skipped}", file=sys.stderr)
    return 1 if wrong else 2 if skipped else slower


def compare(args: argparse.Namespace, run: dict[str, Any], command: str = "bench") -> int:
    """Print a run next to --baseline; return 1 if something is slower by more than --threshold, else 0.

    Returns 2 if the two runs share no size.
    """
    if not args.baseline:
        return 0
    tables = modules.tables
    before = args.baseline_run
    found = modules.baseline.changes(run, before)
    if not found:
        return refuse(f"--baseline {args.baseline} has no size of this run, expected the same op and sizes", command)
    names = before["machine"]["name"], run["machine"]["name"]
    if names[0] != names[1]:
        print(f"the baseline is of another machine: {names[0]}, here {names[1]}", file=sys.stderr)
    threshold = THRESHOLD if args.threshold is None else args.threshold
    slower = [change for change in found if change.slower > threshold / 100]
    print(f"baseline {args.baseline}, {before['date']}, specdec_kernels {before['specdec_kernels']['commit'] or ''}")
    rows = [
        [
            c.op,
            tables.params_text(c.params),
            tables.number_text(c.before),
            tables.number_text(c.now),
            c.unit,
            f"{c.slower:+.1%}",
            "slower" if c in slower else "",
        ]
        for c in found
    ]
    print_table(["op", "size", "before", "now", "unit", "time", "verdict"], rows, left=2, least=["unit"])
    for change in slower:
        size = tables.params_text(change.params)
        print(f"slower than the baseline: {change.op} {size}: {change.slower:+.1%}", file=sys.stderr)
    return 1 if slower else 0


def show(run: dict[str, Any]) -> None:
    """Print the tables of a record."""
    tables = modules.tables
    machine, package = run["machine"], run["specdec_kernels"]
    hardware = machine["name"] + (f", driver {machine['driver']}" if machine["driver"] else "")
    ours = package["version"] + (f" ({package['commit']})" if package["commit"] else "")
    print(f"{hardware}, torch {machine['torch']}, specdec_kernels {ours}, {run['date']}")
    ceilings = run["ceilings"]
    if ceilings:
        bandwidth = f"copy {ceilings['copy_gb_s']} GB/s, read {ceilings['read_gb_s']} GB/s"
        print(f"measured here: {bandwidth}, matrix product {ceilings['tflop_s']} Tflop/s")

    kinds = {tables.ROUND: show_rounds, tables.ENGINES: show_engines, tables.SERVER: show_server}
    lines = run["results"]
    kinds |= {tables.CALLS: show_calls, tables.REPLAY: show_replay, tables.HEADS: show_heads}
    for op, show_kind in kinds.items():
        if of_kind := [line for line in lines if line["op"] == op]:
            lines = [line for line in lines if line["op"] != op]
            show_kind(tables, of_kind, run)
    if lines:
        show_ops(tables, lines)


def show_ops(tables: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Print the times of ops."""
    columns, left = tables.op_columns(lines), 2
    if len({line["op"] for line in lines}) == 1:  # a heading instead of a column
        print(lines[0]["op"])
        columns, left = columns[1:], 1
    print_table(columns, [tables.op_row(line, columns) for line in lines], left=left, least=tables.LEAST)


def show_rounds(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `round`."""
    print(tables.round_head(lines))
    print_table(tables.ROUND_COLUMNS, [tables.round_row(line) for line in lines], least=tables.ROUND_LEAST)
    if timed := [line for line in lines if line.get("of_floor")]:
        print_table(tables.MOVED_COLUMNS, [tables.moved_row(line) for line in timed])
    for line in lines:
        if "profile" in line:
            print(tables.kernels_head(line))
            print_table(tables.KERNEL_COLUMNS, tables.kernel_rows(line))


def show_calls(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `call_overhead`."""
    print_table(["call", "ns"], [[line["params"]["call"], f"{line['host_us'] * 1e3:.0f}"] for line in lines])


def show_engines(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `engines`."""
    print(", ".join(f"{name} {facts.get('version', '?')}" for name, facts in run.get("engines", {}).items()))
    params = lines[0]["params"]
    layers = f" of {params['layers']} layers" if params.get("layers") else ""
    accepts = ", ".join(dict.fromkeys(str(line["params"]["accept"]) for line in lines))
    sizes = f"{params['input']} tokens in, {params['output']} out"
    print(f"{params['shape']}{layers} {params['dtype']}, accept {accepts}, {sizes}")
    print_table(tables.ENGINE_COLUMNS, [tables.engine_row(line) for line in lines], left=2)


def show_server(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `server`."""
    params = lines[0]["params"]
    print(f"{params['shape']} {params['dtype']}, {params['input']} tokens in, {params['output']} out")
    print_table(tables.SERVER_COLUMNS, [tables.server_row(line) for line in lines], left=4)


def show_replay(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `ngram-replay`."""
    rows = [
        [
            *(str(line["params"][name]) for name in ("text", "workload", "drafter", "drafts")),
            f"{line['facts']['accepted']:.3f}",
            f"{line['facts']['drafted']:.1f}",
            f"{line['facts']['us']:.1f}",
        ]
        for line in lines
    ]
    print_table(["text", "workload", "drafter", "drafts", "accepted", "drafted", "us"], rows, left=3)


def show_heads(tables: Any, lines: Sequence[dict[str, Any]], run: dict[str, Any]) -> None:
    """Print the results of `heads`."""
    columns, rows = tables.heads_table(lines)
    print_table(columns, rows, left=2, least=["texts equal"])
