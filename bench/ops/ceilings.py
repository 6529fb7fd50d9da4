"""The device's bandwidth and arithmetic rate, measured in the same run: the denominators of every floor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .timing import cpu_time, gpu_time


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_second: float
    read_bytes_per_second: float
    flops_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return max(self.copy_bytes_per_second, self.read_bytes_per_second)


def seconds(device: torch.device, call: object) -> float:
    assert callable(call)
    return gpu_time([call]).median if device.type == "cuda" else cpu_time([call])[0].best


@cache
def bandwidth(device: torch.device, quick: bool) -> tuple[float, float]:
    """Measure bytes per second of a large copy (read plus written) and of a large read, each by a kernel.

    `Tensor.copy_` becomes a memcpy node of the captured graph, which runs at two thirds of a kernel's rate.
    """
    size = (256 << 20 if quick else 1 << 30) if device.type == "cuda" else (16 << 20 if quick else 128 << 20)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    largest = torch.empty((), device=device)
    copy = seconds(device, lambda: torch.neg(source, out=target))
    read = seconds(device, lambda: torch.amax(source, 0, out=largest))
    return 2 * size / copy, size / read


@cache
def arithmetic(device: torch.device, quick: bool) -> float:
    """Measure flops per second of a large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    cuda = device.type == "cuda"
    n = (4096 if quick else 8192) if cuda else 512
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / seconds(device, lambda: torch.mm(a, b, out=out))


def measure_ceilings(device: torch.device, quick: bool) -> Ceilings:
    return Ceilings(*bandwidth(device, quick), arithmetic(device, quick))
