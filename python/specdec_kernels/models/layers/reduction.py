"""How the partial sums of a linear whose inputs are divided among ranks become whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Reduction(ABC):
    """Sums tensors over all ranks; every rank calls it for the same linears in the same order."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; x may be written over."""

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Any, Tensor]:
        """Return what `norm.add_norm` returns for the sum of the ranks' x; override it to fuse both."""
        result: tuple[Any, Tensor] = norm.add_norm(self.sum(x), residual, out)
        return result


class LocalReduction(Reduction):
    """The reduction of undivided linears: there is nothing to sum, and linears may add to the residual themselves."""

    def sum(self, x: Tensor) -> Tensor:
        return x


LOCAL = LocalReduction()
