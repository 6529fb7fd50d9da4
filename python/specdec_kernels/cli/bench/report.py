"""`specdec bench report` and `headline`: the page of benchmarks and README's chart, from recorded runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import CommandParser
from ..optional_dependencies import require
from .output import load

PACKAGES = ["torch", "matplotlib"]


def add_command(bench: CommandParser) -> None:
    """Add the parsers of both."""
    for name, run, description, output in (
        ("report", run_report, "Write the page of benchmarks and its charts from recorded runs.", "docs/benchmarks.md"),
        ("headline", run_headline, "Draw the chart of README from recorded runs.", "docs/headline.svg"),
    ):
        parser = bench.add_command(name, description=description)
        parser.add_argument(
            "results", type=Path, nargs="?", default=Path("bench/results"), help="folder of the records (bench/results)"
        )
        parser.add_argument("output", type=Path, nargs="?", default=Path(output), help=f"file to write ({output})")
        parser.set_defaults(run=run)


def run_report(args: argparse.Namespace) -> int:
    """Run `specdec bench report` and return its exit code."""
    if not require("bench report", "bench", PACKAGES):
        return 2
    load("report.report").write_report(args.results, args.output)
    return 0


def run_headline(args: argparse.Namespace) -> int:
    """Run `specdec bench headline` and return its exit code."""
    if not require("bench headline", "bench", PACKAGES):
        return 2
    load("report.headline").main([str(args.results), str(args.output)])
    return 0
