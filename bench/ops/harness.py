"""Cases and their measurement: check the result, then time it, and compute the floor that no version can beat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .between import decoder_layers, rewrite, rows_of_pass, times_between
from .ceilings import Ceilings
from .check import WrongResult
from .timing import Call, Times, cpu_time, gpu_time

Params = dict[str, Any]

MAX_INPUT_SETS = 256
INPUTS_SHARE = 0.25  # of the GPU's memory, for all input sets together


@dataclass(frozen=True)
class Baseline:
    """Another implementation. `check` takes what `call` returns and raises WrongResult."""

    name: str
    call: Callable[[], Any]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Work:
    """One input set of an op with allocated outputs, ready to run."""

    call: Call
    check: Callable[[], None]  # of the outputs after one call; raises WrongResult
    bytes_moved: int  # at least: each input is read once, each output written once
    flops: int = 0  # only if arithmetic, not memory, may be the limit
    restore: Call | None = None  # undoes what a call changes, for ops that advance state
    just_written: Sequence[torch.Tensor] = ()  # contiguous inputs that the kernel before writes in a round
    baseline: Baseline | None = None  # plain torch
    packages: Sequence[Baseline] = ()  # other packages' kernels, if installed (baselines/)
    facts: Mapping[str, float | str] = field(default_factory=dict)  # more about the call, such as its plan

    def prepare(self) -> None:
        """Undo the last call, and write the inputs that the kernel before writes in a round."""
        if self.restore is not None:
            self.restore()
        rewrite(self.just_written)

    @property
    def others(self) -> tuple[Baseline, ...]:
        """All baselines."""
        return (*([] if self.baseline is None else [self.baseline]), *self.packages)


@dataclass(frozen=True)
class Case:
    """An op and the sizes it is measured at. The first value of each parameter is the smallest."""

    op: str
    grid: Mapping[str, Sequence[Any]]
    make: Callable[[torch.device, Params], Work]
    cpu_grid: Mapping[str, Sequence[Any]] | None = None  # if the GPU's sizes would take minutes on a CPU
    devices: tuple[str, ...] = ("cpu", "cuda")
    base: Params | None = None  # if all combinations are too many: the size around which one parameter varies

    def sizes(
        self, device: torch.device, quick: bool = False, full: bool = False, **chosen: Sequence[Any]
    ) -> Iterator[Params]:
        """Yield the sizes to measure.

        Without `base`, or with `full`, these are all combinations, else `base` with each parameter's values, one
        parameter at a time. With `quick`, only the smallest size. `chosen` replaces the values of parameters, and every
        combination of them is measured.
        """
        grid = dict(self.cpu_grid if self.cpu_grid is not None and device.type == "cpu" else self.grid)
        unknown = set(chosen) - set(grid)
        if unknown:
            raise ValueError(f"{self.op} has no {' or '.join(sorted(unknown))}, its parameters are {', '.join(grid)}")

        free = {name: values[:1] if quick else values for name, values in grid.items() if name not in chosen}
        if self.base is None or quick or full:
            rest = [dict(zip(free, values, strict=True)) for values in itertools.product(*free.values())]
        else:
            base = {name: self.base[name] if self.base[name] in free[name] else free[name][0] for name in free}
            around = [base | {name: value} for name in free for value in free[name]]
            rest = [size for i, size in enumerate(around) if size not in around[:i]] or [{}]
        for values in itertools.product(*chosen.values()):
            for size in rest:
                size = size | dict(zip(chosen, values, strict=True))
                yield {name: size[name] for name in grid}

    def smallest(self, device: torch.device) -> Params:
        """Return the smallest size."""
        return next(self.sizes(device, quick=True))


@dataclass(frozen=True)
class Result:
    """One line of the table. Times are in seconds; None if not measured."""

    op: str
    params: Params
    device: str
    error: str | None = None  # how it differs from the reference; then it was not timed
    skipped: str | None = None  # why it could not be timed, although nothing was wrong
    time: Times | None = None
    host: Times | None = None  # until the call returns, on a GPU
    bytes_moved: int = 0
    flops: int = 0
    floor: float | None = None
    cold: bool = False  # inputs rotated through more than the L2 cache
    baselines: Mapping[str, Times] = field(default_factory=dict)
    between: Times | None = None  # between the other kernels of a decoder layer (between.py)
    between_baselines: Mapping[str, Times] = field(default_factory=dict)
    facts: Mapping[str, float | str] = field(default_factory=dict)  # further measurements, of `round` for example
    profile: Any = None  # the kernels of a `round`, a dataclass

    @property
    def of_floor(self) -> float | None:
        """Floor over time: 1 is optimal."""
        return self.floor / self.time.median if self.floor and self.time and self.time.median else None


def check(work: Work) -> None:
    """Check one call, and one of each baseline, against the reference.

    Raises:
        WrongResult: one differs.
    """
    restore = work.restore or (lambda: None)
    restore()
    work.call()
    work.check()
    for other in work.others:
        restore()
        try:
            other.check(other.call())
        except WrongResult as error:
            raise WrongResult(f"baseline {other.name}: {error}") from error


def measure(
    case: Case, params: Params, device: torch.device, ceilings: Ceilings, *, between_layers: bool = False
) -> Result:
    """Check and time a case at one size; with `between_layers`, on a GPU, also between a layer's other kernels."""
    shape: dict[str, Any] = {"op": case.op, "params": params, "device": str(device)}
    try:
        first = case.make(device, params)
        check(first)
    except WrongResult as error:
        return Result(**shape, error=str(error))
    except ValueError as error:  # the op refuses the size
        return Result(**shape, skipped=str(error))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return Result(**shape, skipped=f"{device} has not the memory for it")

    floor = max(first.bytes_moved / ceilings.bytes_per_second, first.flops / ceilings.flops_per_second)
    shape |= {"bytes_moved": first.bytes_moved, "flops": first.flops, "floor": floor, "facts": first.facts}
    if device.type == "cuda":
        works, cold = input_sets(case, params, device, first)
        shape |= {"cold": cold} | on_gpu(works)
        if between_layers:
            shape |= between_kernels(works, params, device)
    else:
        shape |= on_cpu(first)
    return Result(**shape)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. On a CPU torch says so only in the message."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def on_gpu(works: Sequence[Work]) -> dict[str, Any]:
    """Time the input sets of a case on a GPU; return fields of its result."""
    first = works[0]
    restores = [work.restore for work in works if work.restore is not None] or None
    return {
        "time": gpu_time([work.call for work in works], restores),
        "host": cpu_time([first.call], after_round=torch.cuda.synchronize)[0],
        "baselines": {
            other.name: gpu_time([work.others[i].call for work in works]) for i, other in enumerate(first.others)
        },
    }


def between_kernels(works: Sequence[Work], params: Params, device: torch.device) -> dict[str, Any]:
    """Time a case and its baselines between the other kernels of a layer; return fields of its result."""
    names = [other.name for other in works[0].others]
    ours, *theirs = times_between(
        decoder_layers(device, rows_of_pass(params)),
        [work.prepare for work in works],
        [[work.call for work in works], *([work.others[i].call for work in works] for i in range(len(names)))],
    )
    return {
        "between": ours,
        "between_baselines": {name: times for name, times in zip(names, theirs, strict=True) if times is not None},
    }


def input_sets(case: Case, params: Params, device: torch.device, first: Work) -> tuple[list[Work], bool]:
    """Return enough input sets that rotating through them evicts each from the L2 cache, and whether they are enough.

    Inputs of which MAX_INPUT_SETS would still fit into the cache are measured in a single set: warm, as in a round,
    where the previous kernel has just written them.
    """
    cache = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    sets = -(-cache // max(first.bytes_moved, 1))
    if sets > MAX_INPUT_SETS:
        return [first], False
    works, used = [first], torch.cuda.memory_allocated(device)
    room = INPUTS_SHARE * torch.cuda.get_device_properties(device).total_memory
    while len(works) < sets and torch.cuda.memory_allocated(device) - used < room:
        works.append(case.make(device, params))
    return works, len(works) == sets


def on_cpu(work: Work) -> dict[str, Any]:
    """Time a case on a CPU; return fields of its result."""
    if work.restore is not None:
        return {"time": cpu_time([work.call], restores=[work.restore])[0]}
    ours, *theirs = cpu_time([work.call, *(other.call for other in work.others)])
    return {"time": ours, "baselines": {other.name: t for other, t in zip(work.others, theirs, strict=True)}}
