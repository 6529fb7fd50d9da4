"""What is captured as CUDA graphs: a round for each batch size and number of nodes, one that applies commands alone,
and prefill passes of some shapes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .passes import Passes
from .prefill import Shape
from .round import Round


@dataclass(frozen=True)
class Graphs:
    """Captured rounds by batch and number of nodes, how many passes beside them, and what capturing all of it cost."""

    by_size: dict[tuple[int, int], torch.cuda.CUDAGraph]  # kept for as long as they may run: they own their memory
    num_passes: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        count = len(self.by_size) + self.num_passes
        return f"captured {count} graphs in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"

    def raw(self) -> dict[tuple[int, int], int]:
        """The rounds as cudaGraph_t."""
        return {size: graph.raw_cuda_graph() for size, graph in self.by_size.items()}


def default_batch_sizes(num_slots: int) -> list[int]:
    """Powers of two and the steps between them: what a round is padded by stays below a third from 8 on."""
    sizes = [1, 2, 4, *(size for power in range(3, 16) for size in (1 << power, 3 << (power - 1)))]
    return [size for size in sizes if size < num_slots] + [num_slots]


def capture(
    round: Round,
    batch_sizes: Sequence[int],
    nodes: Sequence[int],
    passes: Passes,
    shapes: Sequence[Shape],
    stream: torch.cuda.Stream,
    *,
    progress: bool = False,
) -> Graphs:
    """Capture `round.launch` for every batch size and number of nodes, and for 0, and `passes.launch` for these shapes,
    on the stream that will run them.

    Large rounds come first and all graphs share one pool of memory: a smaller round fits into what a larger one took.
    What a graph allocates is read by no other. A round is run before it is captured, which loads kernels and
    workspaces, unless one with as many rows has been; and so is every pass, on a slot that nobody holds.
    """
    torch.cuda.synchronize(stream.device)  # what made the weights and the state is done
    torch.cuda.empty_cache()  # as every capture does: what is counted is what stays
    begin, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    before = torch.cuda.memory_reserved(stream.device)
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
    sizes = [(batch, count) for batch in sorted(batch_sizes, reverse=True) for count in sorted(nodes, reverse=True)]
    bar = Bar(len(sizes) + 1 + len(shapes)) if progress else None
    warm: set[int] = set()
    for size in (*sizes, (0, 0)):
        rows = size[0] * size[1]
        if rows not in warm or size[1] == max(nodes):
            with torch.cuda.stream(stream):
                round.launch(*size)
            warm.add(rows)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            round.launch(*size)
        graphs[size] = graph
        if bar:
            bar.advance(f"rounds (batch {size[0]}, {size[1]} nodes)")
    for shape in sorted(shapes, reverse=True):
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=stream.device)
        with torch.cuda.stream(stream):
            passes.launch(packed, shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            passes.launch(packed, shape)
        passes.captured[shape] = graph, packed
        if bar:
            bar.advance(f"passes ({shape.rows} rows)")
    stream.synchronize()
    round.rings.reset()  # of the rounds that only warmed up
    num_bytes = torch.cuda.memory_reserved(stream.device) - before
    captured = Graphs(graphs, len(shapes), time.perf_counter() - begin, num_bytes)
    if bar:
        bar.finish(captured)
    return captured


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
