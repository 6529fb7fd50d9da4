"""What a case is, and how one is measured: check, then time, beside the floor that no version can beat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .ceilings import Ceilings
from .compare import WrongResult
from .timing import Call, Times, cpu_time, gpu_time

Params = dict[str, Any]

MAX_INPUT_SETS = 64


@dataclass(frozen=True)
class Baseline:
    """Another way to the same result. `check` gets what `call` returns and raises WrongResult."""

    name: str
    call: Callable[[], Any]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Work:
    """One input set of an op, ready to run on outputs that are already there."""

    call: Call
    check: Callable[[], None]  # of the outputs after one call; raises WrongResult
    bytes_moved: int  # through memory at least: each input read once, each output written once
    flops: int = 0  # only where arithmetic, not memory, may be the limit
    restore: Call | None = None  # puts back what a call changes, for ops that advance state
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Case:
    """An op with the sizes it is measured at. The first value of each parameter is the smallest."""

    op: str
    grid: Mapping[str, Sequence[Any]]
    make: Callable[[torch.device, Params], Work]
    cpu_grid: Mapping[str, Sequence[Any]] | None = None  # where the GPU's sizes would take minutes on a CPU
    devices: tuple[str, ...] = ("cpu", "cuda")

    def sizes(self, device: torch.device, quick: bool = False, **chosen: Sequence[Any]) -> Iterator[Params]:
        """All combinations, or with `quick` the smallest; `chosen` replaces a parameter's values in either."""
        grid = dict(self.cpu_grid if self.cpu_grid is not None and device.type == "cpu" else self.grid)
        if quick:
            grid = {name: values[:1] for name, values in grid.items()}
        unknown = set(chosen) - set(grid)
        if unknown:
            raise ValueError(f"{self.op} has no {' or '.join(sorted(unknown))}, its parameters are {', '.join(grid)}")
        grid |= chosen
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))

    def smallest(self, device: torch.device) -> Params:
        return next(self.sizes(device, quick=True))


@dataclass(frozen=True)
class Result:
    """One line of the table. Times in seconds; None where there is none to give."""

    op: str
    params: Params
    device: str
    error: str | None = None  # what differs from the reference: then nothing was timed
    time: Times | None = None
    host: Times | None = None  # of the call's return, on a GPU
    bytes_moved: int = 0
    flops: int = 0
    floor: float | None = None
    cold: bool = False  # inputs rotated through more than the L2 cache
    baseline_name: str | None = None
    baseline: Times | None = None

    @property
    def of_floor(self) -> float | None:
        """The share of the time that the floor explains: 1 is perfect."""
        return self.floor / self.time.median if self.floor and self.time and self.time.median else None


def check(work: Work) -> None:
    """One call, and one of the baseline, each against the reference. Raises WrongResult."""
    if work.restore is not None:
        work.restore()
    work.call()
    work.check()
    if work.baseline is not None:
        try:
            work.baseline.check(work.baseline.call())
        except WrongResult as error:
            raise WrongResult(f"baseline {work.baseline.name}: {error}") from error


def measure(case: Case, params: Params, device: torch.device, ceilings: Ceilings) -> Result:
    first = case.make(device, params)
    shape: dict[str, Any] = {"op": case.op, "params": params, "device": str(device)}
    try:
        check(first)
    except WrongResult as error:
        return Result(**shape, error=str(error))

    floor = max(first.bytes_moved / ceilings.bytes_per_second, first.flops / ceilings.flops_per_second)
    shape |= {"bytes_moved": first.bytes_moved, "flops": first.flops, "floor": floor}
    if first.baseline is not None:
        shape["baseline_name"] = first.baseline.name
    timed = on_gpu(case, params, device, first) if device.type == "cuda" else on_cpu(first)
    return Result(**shape, **timed)


def on_gpu(case: Case, params: Params, device: torch.device, first: Work) -> dict[str, Any]:
    cache = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    sets = min(MAX_INPUT_SETS, -(-cache // max(first.bytes_moved, 1)))
    works = [first, *(case.make(device, params) for _ in range(sets - 1))]
    restores = [work.restore for work in works if work.restore is not None] or None
    timed: dict[str, Any] = {
        "time": gpu_time([work.call for work in works], restores),
        "host": cpu_time([first.call], after_round=torch.cuda.synchronize)[0],
        "cold": sets * first.bytes_moved >= cache,
    }
    baselines = [work.baseline.call for work in works if work.baseline is not None]
    if baselines:
        timed["baseline"] = gpu_time(baselines)
    return timed


def on_cpu(work: Work) -> dict[str, Any]:
    if work.restore is not None:
        return {"time": cpu_time([work.call], restores=[work.restore])[0]}
    if work.baseline is None:
        return {"time": cpu_time([work.call])[0]}
    ours, theirs = cpu_time([work.call, work.baseline.call])
    return {"time": ours, "baseline": theirs}
