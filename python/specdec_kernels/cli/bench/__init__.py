"""`specdec bench`: time ops, rounds, forward passes, engines and servers, and report on recorded runs.

Every module is one benchmark: its parser, and `run`, which loads the package `specdec_kernels.bench` lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import engines, forward, ngram_replay, ops, report, rounds, server

if TYPE_CHECKING:
    from ..arguments import Subparsers

BENCHMARKS = (rounds, forward, ngram_replay, engines, server, report)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser, and those of the benchmarks that are no op."""
    parser = ops.add_parser(subparsers)
    for benchmark in BENCHMARKS:
        benchmark.add_command(parser)
