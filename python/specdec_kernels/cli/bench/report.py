"""`specdec bench report` and `headline`: the page of benchmarks and README's chart, from recorded runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import CommandParser
from ..optional_dependencies import require, unwritable
from . import modules
from .output import refuse

PACKAGES = ["torch", "matplotlib"]


def add_command(bench: CommandParser) -> None:
    """Add the parsers of both."""
    for name, description, output in (
        ("report", "Write the page of benchmarks and its charts from recorded runs.", "docs/benchmarks.md"),
        ("headline", "Draw the chart of README from recorded runs.", "docs/headline.svg"),
    ):
        parser = bench.add_command(name, description=description)
        parser.add_argument(
            "results", type=Path, nargs="?", default=Path("bench/results"), help="folder of the records (bench/results)"
        )
        parser.add_argument("output", type=Path, nargs="?", default=Path(output), help=f"file to write ({output})")
        parser.set_defaults(run=run, benchmark=name)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    name = args.benchmark
    if not require(f"bench {name}", "bench", PACKAGES):
        return 2
    write = {"report": modules.report.write_report, "headline": modules.headline.write_headline}[name]
    suffix = {"report": ".md", "headline": ".svg"}[name]
    if args.output.suffix != suffix:
        return refuse(f"output is {args.output}, expected a file's name in {suffix}", f"bench {name}")
    if not any(args.results.glob("*.json")):
        return refuse(f"results is {args.results}, expected a folder with records", f"bench {name}")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        if why := unwritable(args.output):
            return refuse(f"output is {args.output}, which {why}", f"bench {name}")
        write(args.results, args.output)
    except (OSError, ValueError) as error:  # of a file that is no record
        return refuse(str(error), f"bench {name}")
    return 0
