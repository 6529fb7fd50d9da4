"""CUDA graphs of an engine.

Captured are a round for each batch size, number of rows and KV bucket, one that only applies commands, and prefill
passes of some shapes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ... import _C
from .prefill import Shape
from .prefill_graphs import Passes
from .round import Round


class RoundSize(NamedTuple):
    """The static sizes of a round: slots, nodes to verify, and the KV rows that no slot exceeds.

    `num_rows` is `_C.CATCH_UP` for the pass in which a draft catches up, and `_C.FIRST_ROUND` for the first round of
    slots that have been prefilled.
    """

    batch: int
    num_rows: int
    max_kv_len: int


@dataclass(frozen=True)
class Graphs:
    """Captured rounds by size, the number of captured passes, and the cost of capturing them all."""

    # The parts of a round, in order. Graphs own their memory, so they live as long as they may run.
    by_size: dict[RoundSize, list[torch.cuda.CUDAGraph]]
    num_passes: int
    seconds: float
    num_bytes: int

    @property
    def count(self) -> int:
        return sum(map(len, self.by_size.values())) + self.num_passes

    def __str__(self) -> str:
        return f"captured {self.count} graphs in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"

    def raw(self) -> dict[tuple[int, int, int], list[int]]:
        """Return the rounds as cudaGraph_t."""
        return {size: [graph.raw_cuda_graph() for graph in parts] for size, parts in self.by_size.items()}


def default_batch_sizes(num_slots: int) -> list[int]:
    """Return powers of two and, from 8 on, the steps between them, which keep padding below a third."""
    sizes = [1, 2, 4, *(size for power in range(3, 16) for size in (1 << power, 3 << (power - 1)))]
    return [size for size in sizes if size < num_slots] + [num_slots]


def capture(
    round: Round,
    round_sizes: Sequence[RoundSize],
    passes: Passes,
    shapes: Sequence[Shape],
    stream: torch.cuda.Stream,
    *,
    progress: bool = False,
) -> Graphs:
    """Capture `round.launch` for these sizes and for 0, and `passes.launch` for these shapes, on the rounds' stream.

    Large rounds come first and all graphs share one memory pool: a smaller round fits into what a larger one took. No
    graph reads what another allocates. Each round runs once before it is captured, which loads kernels and workspaces,
    unless one with the same rows and KV has run; so does each pass, on a slot without a request.
    """
    torch.cuda.synchronize(stream.device)  # the work that made weights and state is done
    round.reset()  # warm-up rounds apply no record of earlier rounds
    torch.cuda.empty_cache()  # as every capture does, so that only memory that stays is counted
    begin, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    before = torch.cuda.memory_reserved(stream.device)
    graphs: dict[RoundSize, list[torch.cuda.CUDAGraph]] = {}
    sizes = [*sorted(round_sizes, reverse=True), RoundSize(0, 0, 0)]
    most_rows = {size.batch: size.num_rows for size in reversed(sizes)}
    bar = Bar(len(sizes) + len(shapes)) if progress else None
    warm: set[tuple[int, int]] = set()
    for size in sizes:
        rows_and_kv = size.num_rows, size.max_kv_len
        if rows_and_kv not in warm or size.num_rows in (_C.CATCH_UP, _C.FIRST_ROUND, most_rows[size.batch]):
            with torch.cuda.stream(stream):
                round.launch(*size)
            warm.add(rows_and_kv)
        # Where the host masks a round's logits the round is two graphs.
        in_halves = round.masks is not None and size.num_rows != _C.CATCH_UP
        halves = [round.forward, round.finish] if in_halves else [round.launch]
        graphs[size] = []
        for part in halves:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with capturing(graph, pool, stream):
                part(*size)
            graphs[size].append(graph)
        if bar:
            nodes = "first" if size.num_rows == _C.FIRST_ROUND else f"{size.num_rows} nodes"
            bar.advance(f"rounds (batch {size.batch}, {nodes})")
    for shape in sorted(shapes, reverse=True):
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=stream.device)
        with torch.cuda.stream(stream):
            passes.launch(packed, shape)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool, stream):
            passes.launch(packed, shape)
        passes.captured[shape] = graph, packed
        if bar:
            bar.advance(f"passes ({shape.rows} rows)")
    stream.synchronize()
    round.reset()  # discard warm-up rounds
    num_bytes = torch.cuda.memory_reserved(stream.device) - before
    captured = Graphs(graphs, len(shapes), time.perf_counter() - begin, num_bytes)
    if bar:
        bar.finish(captured)
    return captured


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture a graph undisturbed by other engines of this process.

    A capture fails when its thread frees device memory. The garbage collector does so at any Python allocation if an
    unreachable engine is in a cycle, so collection is off meanwhile. Device work of other threads, such as another
    engine's rounds, is no part of the capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class Bar:
    """A progress bar on the terminal, and a line with the cost at the end."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), transient=True)
        self._task = self._progress.add_task("capturing", total=total)
        self._progress.start()

    def advance(self, what: str) -> None:
        self._progress.update(self._task, advance=1, description=f"capturing {what}")

    def finish(self, graphs: Graphs) -> None:
        self._progress.stop()
        self._progress.console.print(str(graphs))
