"""The two clocks: time on the GPU, from graph replays, and time on the host, from the wall clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]

CALLS_PER_GRAPH = 20
REPLAYS = 40  # medians are of at least 30
SLOW_SECONDS = 1e-3  # a call beside which the launch of a graph is nothing
ROUND_SECONDS = 2e-3
MAX_SECONDS = 2.0  # of host timing; a slow op gets fewer rounds, never fewer than MIN_ROUNDS
MIN_ROUNDS, MAX_ROUNDS = 5, 40
MAX_CALLS = 10_000  # a round
MAX_LAUNCHES = 200  # a round of calls that launch: well below the depth of a GPU's queue, where a launch would wait


@dataclass(frozen=True)
class Times:
    """Seconds per call, over replays or rounds."""

    best: float
    median: float
    p90: float


def times_of(samples: Sequence[float]) -> Times:
    ordered = sorted(samples)
    return Times(ordered[0], median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)])


def gpu_time(calls: Sequence[Call], restores: Sequence[Call] | None = None) -> Times:
    """Time per call on the GPU of the calls, each on its own inputs, captured into one CUDA graph.

    About CALLS_PER_GRAPH calls a graph, so that the launch of the graph itself does not count; of a slow call, one.
    With `restores`, which put back what a call changed, each call is preceded by its restore, and the time of a graph
    of the restores alone is taken off; best and p90 are then approximate.
    """
    repeats = 1 if is_slow(calls[0]) else max(1, CALLS_PER_GRAPH // len(calls))
    n = repeats * len(calls)
    if restores is None:
        return times_of([seconds / n for seconds in replay_seconds(list(calls) * repeats)])
    both = list(itertools.chain.from_iterable(zip(restores, calls, strict=True))) * repeats
    alone = median(replay_seconds(list(restores) * repeats))
    return times_of([max(seconds - alone, 0.0) / n for seconds in replay_seconds(both)])


def is_slow(call: Call) -> bool:
    call()  # loads, or even compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start > SLOW_SECONDS


def replay_seconds(calls: Sequence[Call]) -> list[float]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # loads lazily loaded kernels outside the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    starts, ends = [], []
    for _ in range(REPLAYS):
        starts.append(new_event())
        ends.append(new_event())
        starts[-1].record()
        graph.replay()
        ends[-1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in zip(starts, ends, strict=True)]


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cpu_time(
    calls: Sequence[Call], after_round: Call | None = None, restores: Sequence[Call] | None = None
) -> list[Times]:
    """Wall time per call of each of `calls`, in interleaved rounds, so that a slow spell of the machine hits them all.

    `after_round` runs outside the clock, to drain the queue of a GPU. With `restores`, one call is timed at a time
    with its restore before it, outside the clock.
    """
    most = MAX_CALLS if after_round is None else MAX_LAUNCHES
    counts = [1 if restores is not None else calls_per_round(call, most) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() - begin > MAX_SECONDS:
            break
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            if restores is not None:
                restores[i]()
            start = time.perf_counter()
            for _ in itertools.repeat(None, count):
                call()
            samples[i].append((time.perf_counter() - start) / count)
            if after_round is not None:
                after_round()
    return [times_of(s) for s in samples]


def calls_per_round(call: Call, most: int) -> int:
    call()
    start = time.perf_counter()
    call()
    return max(1, min(most, int(ROUND_SECONDS / max(time.perf_counter() - start, 1e-9))))
