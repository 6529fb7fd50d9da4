"""Times of the kernels of a captured round by name, from torch's profiler."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace's events on the GPU
FEW = 8  # a launch of fewer kernels is no round


@dataclass(frozen=True)
class KernelTime:
    """A kernel in a round."""

    name: str
    launches: float  # in a round
    microseconds: float  # of all launches of a round; while a kernel runs that started before, it does not count


@dataclass(frozen=True)
class RoundProfile:
    """The kernels of one graph, as means over its launches.

    Attributes:
        launches: of the graph.
        microseconds: from the first kernel's start to the last one's end.
        idle: the part of them in which no kernel runs.
        kernels: the longest first. Their times add up to those in which some kernel runs.
    """

    launches: int
    microseconds: float
    idle: float
    kernels: list[KernelTime]


def profile_rounds(run: Callable[[], object]) -> RoundProfile | None:
    """Run a function and return the kernels of the graph that it launches most often; None if it launches none."""
    from torch.profiler import ProfilerActivity, profile

    with TemporaryDirectory() as folder:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return profile_of(json.loads(file.read_text())["traceEvents"])


def profile_of(events: Iterable[dict[str, Any]]) -> RoundProfile | None:
    """Return the kernels of the graph that is launched most often in a trace.

    The kernels of a graph's launch share the correlation id of that launch. Launches of the same kernels are launches
    of the same graph.
    """
    by_launch = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_WORK and "correlation" in event.get("args", {}):
            by_launch[event["args"]["correlation"]].append(event)
    graphs: dict[frozenset[tuple[str, int]], list[list[dict[str, Any]]]] = defaultdict(list)
    for launch in by_launch.values():
        if len(launch) >= FEW:
            graphs[frozenset(Counter(event["name"] for event in launch).items())].append(launch)
    if not graphs:
        return None
    launches = max(graphs.values(), key=lambda same: (len(same), sum(map(span, same))))
    count = len(launches)
    totals: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        for name, duration in own_times(launch):
            totals[short_name(name)].append(duration)
    kernels = [KernelTime(name, len(each) / count, sum(each) / count) for name, each in totals.items()]
    whole = sum(map(span, launches)) / count
    return RoundProfile(
        count,
        whole,
        whole - sum(kernel.microseconds for kernel in kernels),
        sorted(kernels, key=lambda kernel: -kernel.microseconds),
    )


def span(launch: Sequence[dict[str, Any]]) -> float:
    """Return the microseconds from the first start to the last end."""
    start: float = min(event["ts"] for event in launch)
    end: float = max(event["ts"] + event["dur"] for event in launch)
    return end - start


def own_times(launch: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield each kernel's name and the microseconds in which no kernel runs that started before it.

    Kernels of a dependent launch start early and wait: their durations overlap.
    """
    reached = float("-inf")
    for event in sorted(launch, key=lambda event: float(event["ts"])):
        end = event["ts"] + event["dur"]
        yield event["name"], max(0.0, end - max(event["ts"], reached))
        reached = max(reached, end)


def short_name(name: str) -> str:
    """Return a kernel's name without its return type, namespaces without a name, and parameters."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:at]
            break
    return re.sub(r"\s+", " ", name).strip()
