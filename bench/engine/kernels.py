"""Times of the kernels of a captured round by name, from torch's profiler."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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
    microseconds: float  # of all launches of a round


@dataclass(frozen=True)
class RoundProfile:
    """The kernels of one graph, as means over its launches.

    Attributes:
        launches: of the graph.
        microseconds: from the first kernel's start to the last one's end.
        idle: the part of them in which no kernel runs.
        kernels: the longest first. A kernel that starts while another still runs includes its wait.
    """

    launches: int
    microseconds: float
    idle: float
    kernels: list[KernelTime]


def profile_rounds(run: Callable[[], object]) -> RoundProfile | None:
    """Run a function and return the kernels of the graph that takes most of its time; None if it launches no graph."""
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
    """Return the kernels of the graph that takes most of the time of a trace's events.

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
    launches = max(graphs.values(), key=lambda same: sum(map(span, same)))
    count = len(launches)
    times: dict[str, list[float]] = defaultdict(list)
    for event in (event for launch in launches for event in launch):
        times[short_name(event["name"])].append(event["dur"])
    kernels = [KernelTime(name, len(durations) / count, sum(durations) / count) for name, durations in times.items()]
    return RoundProfile(
        count,
        sum(map(span, launches)) / count,
        sum(span(launch) - busy(launch) for launch in launches) / count,
        sorted(kernels, key=lambda kernel: -kernel.microseconds),
    )


def span(launch: Sequence[dict[str, Any]]) -> float:
    """Return the microseconds from the first start to the last end."""
    return max(event["ts"] + event["dur"] for event in launch) - min(event["ts"] for event in launch)


def busy(launch: Sequence[dict[str, Any]]) -> float:
    """Return the microseconds in which some kernel runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in launch):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


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
