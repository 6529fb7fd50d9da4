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
REPLAYS = 40  # a median needs at least 30
SLOW_SECONDS = 1e-3  # the launch of a graph is negligible for slower calls
ROUND_SECONDS = 2e-3
MAX_SECONDS = 2.0  # of host timing; a slow op runs fewer rounds, at least MIN_ROUNDS
MIN_ROUNDS, MAX_ROUNDS = 5, 40
MAX_CALLS = 10_000  # per round
MAX_LAUNCHES = 200  # per round of calls that launch: well below the depth of a GPU's queue, where a launch waits


@dataclass(frozen=True)
class Times:
    """Seconds per call, over replays or rounds."""

    best: float
    median: float
    p90: float


def times_of(samples: Sequence[float]) -> Times:
    """Return statistics of samples."""
    ordered = sorted(samples)
    return Times(ordered[0], median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)])


def gpu_time(calls: Sequence[Call], restores: Sequence[Call] | None = None) -> Times:
    """Measure the time per call on the GPU, with calls on different inputs captured into one CUDA graph.

    A graph has about CALLS_PER_GRAPH calls, so that its launch is negligible, or one slow call. With `restores`, which
    undo what a call changes, each call is preceded by its restore, and the time of a graph of the restores alone is
    subtracted; best and p90 are then approximate.
    """
    repeats = 1 if is_slow(calls[0]) else max(1, CALLS_PER_GRAPH // len(calls))
    n = repeats * len(calls)
    if restores is None:
        return times_of([seconds / n for seconds in replay_seconds(list(calls) * repeats)])
    both = list(itertools.chain.from_iterable(zip(restores, calls, strict=True))) * repeats
    alone = median(replay_seconds(list(restores) * repeats))
    return times_of([max(seconds - alone, 0.0) / n for seconds in replay_seconds(both)])


def is_slow(call: Call) -> bool:
    """Return whether a call takes longer than SLOW_SECONDS."""
    call()  # loads or compiles kernels
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start > SLOW_SECONDS


def replay_seconds(calls: Sequence[Call]) -> list[float]:
    """Capture calls into a CUDA graph and return the seconds of each of REPLAYS replays."""
    graph = capture(calls)
    return seconds_of([replay(graph) for _ in range(REPLAYS)])


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture calls into a CUDA graph and replay it until its time is steady."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # load kernels outside the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueue a replay, and return the events before and after it."""
    start, end = new_event(), new_event()
    start.record()
    graph.replay()
    end.record()
    return start, end


def seconds_of(replays: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    """Wait for the GPU and return the seconds between each pair of events."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in replays]


def new_event() -> torch.cuda.Event:
    """Return an event for timing."""
    return torch.cuda.Event(enable_timing=True)


def cpu_time(
    calls: Sequence[Call], after_round: Call | None = None, restores: Sequence[Call] | None = None
) -> list[Times]:
    """Measure the wall time per call of each of `calls`, in interleaved rounds, so that other load affects them alike.

    `after_round` runs outside the clock, to drain the queue of a GPU. With `restores`, each call is timed alone, after
    its restore, which is outside the clock.
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
    """Return how many calls take ROUND_SECONDS, at most `most`."""
    call()
    start = time.perf_counter()
    call()
    return max(1, min(most, int(ROUND_SECONDS / max(time.perf_counter() - start, 1e-9))))
