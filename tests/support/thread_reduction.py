"""A test double of a reduction: ranks are threads of one process that meet at a barrier and sum their parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec_kernels.models.layers.reduction import Reduction

R = TypeVar("R")


class ThreadReduction(Reduction):
    """Sums over `size` threads; `run` starts one per rank. Counts fused norms and plain sums."""

    def __init__(self, size: int) -> None:
        self.size, self.sums, self.norms = size, 0, 0
        self._barrier = threading.Barrier(size, timeout=300)
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._rank = threading.local()

    def run(self, function: Callable[[int], R]) -> list[R]:
        """Run a function of the rank on all ranks at once, and return what each returns."""

        def ranked(rank: int) -> R:
            self._rank.value = rank
            with torch.inference_mode():
                return function(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(ranked, range(self.size)))

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum, and spoil x, which NCCL and our kernels write over."""
        self.sums += self._rank.value == 0
        total = self._joined(x, lambda parts: torch.stack(parts).sum(0, dtype=x.dtype))
        x.fill_(torch.nan if x.is_floating_point() else 1)
        return total

    def gather(self, x: Tensor) -> Tensor:
        return self._joined(x, lambda parts: torch.cat(parts, -1))

    def _joined(self, x: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._parts[self._rank.value] = x
        self._barrier.wait()
        joined = join(self._parts)
        self._barrier.wait()
        return joined

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Any, Tensor]:
        self.norms += self._rank.value == 0
        return super().add_norm(norm, x, residual, out)
