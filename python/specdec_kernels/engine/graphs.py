"""Rounds captured as CUDA graphs: one for each batch size, and one that applies commands alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .round import Round


@dataclass(frozen=True)
class Graphs:
    """Captured rounds by batch, and what capturing them cost."""

    by_batch: dict[int, torch.cuda.CUDAGraph]  # kept for as long as they may run: they own their memory
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        return f"captured {len(self.by_batch)} graphs in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"

    def raw(self) -> dict[int, int]:
        """The graphs as cudaGraph_t."""
        return {batch: graph.raw_cuda_graph() for batch, graph in self.by_batch.items()}


def default_batch_sizes(num_slots: int) -> list[int]:
    """Powers of two and the steps between them: what a round is padded by stays below a third from 8 on."""
    sizes = [1, 2, 4, *(size for power in range(3, 16) for size in (1 << power, 3 << (power - 1)))]
    return [size for size in sizes if size < num_slots] + [num_slots]


def capture_rounds(
    round: Round, batch_sizes: Sequence[int], stream: torch.cuda.Stream, *, progress: bool = False
) -> Graphs:
    """Capture `round.launch` for every batch size and for 0, on the stream that will run them.

    Large batches come first and all graphs share one pool of memory: a smaller round fits into what a larger one took.
    What a graph allocates is read by no other.
    """
    torch.cuda.synchronize(stream.device)  # what made the weights and the state is done
    torch.cuda.empty_cache()  # as every capture does: what is counted is what stays
    begin, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    before = torch.cuda.memory_reserved(stream.device)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    bar = Bar(len(batch_sizes) + 1) if progress else None
    for batch in (*sorted(batch_sizes, reverse=True), 0):
        with torch.cuda.stream(stream):
            round.launch(batch)  # loads kernels and workspaces, which a capture must not
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            round.launch(batch)
        graphs[batch] = graph
        if bar:
            bar.advance(batch)
    stream.synchronize()
    round.rings.reset()  # of the rounds that only warmed up
    captured = Graphs(graphs, time.perf_counter() - begin, torch.cuda.memory_reserved(stream.device) - before)
    if bar:
        bar.finish(captured)
    return captured


class Bar:
    """Progress on the terminal, and a line of what it cost."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), transient=True)
        self._task = self._progress.add_task("capturing rounds", total=total)
        self._progress.start()

    def advance(self, batch: int) -> None:
        self._progress.update(self._task, advance=1, description=f"capturing rounds (batch {batch})")

    def finish(self, graphs: Graphs) -> None:
        self._progress.stop()
        self._progress.console.print(str(graphs))
