"""Time of a call at the Python boundary: `specdec bench call_overhead`.

Calls that do nothing with 1, 4 and 8 tensors, through the DLPack exchange API (torch) and through the `__dlpack__`
fallback (NumPy), and real ops on an empty batch with outputs passed. The result is the minimum over interleaved rounds
and includes about 10 ns of the loop around the call.
"""

from __future__ import annotations

import importlib.util
import timeit
from collections.abc import Callable
from typing import Any

import torch

import specdec_kernels as sd
from specdec_kernels import _C

from .harness import Result
from .timing import times_of

NAME = "call_overhead"
CALLS_PER_ROUND = 2000
ROUNDS, QUICK_ROUNDS = 50, 5


def calls(device: torch.device) -> dict[str, timeit.Timer]:
    """Return the timers by name."""
    tensors = [torch.zeros(4, device=device) for _ in range(8)]
    timers = {
        f"_C.{op.__name__}, torch": timer(op, [None, *tensors[:n]])
        for op, n in ((_C.noop1, 1), (_C.noop4, 4), (_C.noop8, 8))
    }
    if importlib.util.find_spec("numpy") is not None:
        arrays = [tensor.cpu().numpy() for tensor in tensors]
        timers |= {
            f"_C.{op.__name__}, numpy": timer(op, [None, *arrays[:n]])
            for op, n in ((_C.noop1, 1), (_C.noop4, 4), (_C.noop8, 8))
        }
    return timers | {
        "ops.select_topk, 4 torch, empty batch": empty_select_topk(device),
        "ops.free_pages, 7 torch, no slots": empty_free_pages(device),
    }


def empty_select_topk(device: torch.device) -> timeit.Timer:
    """Return a timer of `select_topk` on an empty batch."""
    logits = torch.empty(0, 8, device=device)
    id_map = torch.arange(8, dtype=torch.int32, device=device)
    out = sd.TopK(torch.empty(0, 2, dtype=torch.int32, device=device), torch.empty(0, 2, device=device))
    return timer(sd.select_topk, [logits, 2], id_map=id_map, out=out)


def empty_free_pages(device: torch.device) -> timeit.Timer:
    """Return a timer of `free_pages` without slots."""
    prefix_lens = torch.empty(0, dtype=torch.int32, device=device)
    return timer(sd.free_pages, [sd.make_page_pool(4, 0, 4, 16, prefix_lens), prefix_lens])


def timer(function: Callable[..., Any], args: list[Any], **keywords: Any) -> timeit.Timer:
    """Return a Timer of the bare call: arguments are locals of the timed loop, which unpacks nothing."""
    names = {f"a{i}": value for i, value in enumerate(args)} | keywords
    call = ", ".join([*(f"a{i}" for i in range(len(args))), *(f"{name}={name}" for name in keywords)])
    setup = "; ".join(["f = function_", *(f"{name} = {name}_" for name in names)])
    return timeit.Timer(f"f({call})", setup, globals={"function_": function, **{f"{k}_": v for k, v in names.items()}})


def measure_calls(device: torch.device, quick: bool) -> list[Result]:
    """Measure all calls."""
    timers = calls(device)
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, t in timers.items():
            samples[name].append(t.timeit(CALLS_PER_ROUND) / CALLS_PER_ROUND)
    return [Result(NAME, {"call": name}, str(device), host=times_of(s)) for name, s in samples.items()]
