"""What is captured as CUDA graphs: a round for each batch size, number of rows and range of KV lengths, one that
applies commands alone, and prefill passes of some shapes.
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
    """What is static about a round: slots, nodes that it verifies, and the KV rows that no slot exceeds. With
    `_C.CATCH_UP` in place of nodes, about the pass in which a draft catches up; with `_C.FIRST_ROUND`, about the first
    round of those that have been prefilled."""

    batch: int
    num_rows: int
    max_kv_len: int


@dataclass(frozen=True)
class Graphs:
    """Captured rounds by size, how many passes beside them, and what capturing all of it cost."""

    by_size: dict[
        RoundSize, list[torch.cuda.CUDAGraph]
    ]  # one behind the other; kept for as long as they may run: they own their memory
    num_passes: int
    seconds: float
    num_bytes: int

    @property
    def count(self) -> int:
        return sum(map(len, self.by_size.values())) + self.num_passes

    def __str__(self) -> str:
        return f"captured {self.count} graphs in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"

    def raw(self) -> dict[tuple[int, int, int], list[int]]:
        """The rounds as cudaGraph_t."""
        return {size: [graph.raw_cuda_graph() for graph in parts] for size, parts in self.by_size.items()}


def default_batch_sizes(num_slots: int) -> list[int]:
    """Powers of two and the steps between them: what a round is padded by stays below a third from 8 on."""
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
    """Capture `round.launch` for these sizes, and for 0, and `passes.launch` for these shapes, on the stream that will
    run them.

    Large rounds come first and all graphs share one pool of memory: a smaller round fits into what a larger one took.
    What a graph allocates is read by no other. A round is run before it is captured, which loads kernels and
    workspaces, unless one with as many rows and as much KV has been; and so is every pass, on a slot that nobody
    holds.
    """
    torch.cuda.synchronize(stream.device)  # what made the weights and the state is done
    round.reset()  # rounds that only warm up apply no record of rounds that were
    torch.cuda.empty_cache()  # as every capture does: what is counted is what stays
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
        # Where the host may have its say about a round's logits it is two graphs.
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
    round.reset()  # of the rounds that only warmed up
    num_bytes = torch.cuda.memory_reserved(stream.device) - before
    captured = Graphs(graphs, len(shapes), time.perf_counter() - begin, num_bytes)
    if bar:
        bar.finish(captured)
    return captured


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """`torch.cuda.graph`, undisturbed by other engines of this process.

    A capture ends in an error when its thread frees device memory, as the garbage collector does at any allocation of
    Python's where an engine that nobody holds any more lies in a cycle: so it waits. What other threads do to the
    device, an engine that runs rounds, say, is no part of the capture.
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
    """Progress on the terminal, and a line of what it cost."""

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
