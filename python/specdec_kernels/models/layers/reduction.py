"""Reductions of the partial sums of a linear whose inputs are divided among ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Reduction(ABC):
    """Sums tensors over all ranks; every rank calls it for the same linears in the same order.

    All ranks get the same bits.
    """

    size: int = 1  # the number of ranks

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; x may be written over."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors next to each other along the last dimension, in the order of ranks."""

    def broadcast(self, given: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return rank 0's tensor on all ranks; `given` is None on the others. The sum is that of its bytes and zeros.

        Args:
            given: the tensor, on the device; it is not changed.
            shape: of the tensor, as all others known on all ranks.
            dtype: of the tensor.
            device: that of this rank.
        """
        sent = torch.zeros(tuple(shape), dtype=dtype, device=device) if given is None else given.clone().contiguous()
        if not sent.numel():
            return sent
        return self.sum(sent.view(-1).view(torch.uint8)).view(dtype).view(tuple(shape))

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Any, Tensor]:
        """Return what `norm.add_norm` returns for the sum of the ranks' x; override it to fuse both."""
        result: tuple[Any, Tensor] = norm.add_norm(self.sum(x), residual, out)
        return result


class LocalReduction(Reduction):
    """The reduction of undivided linears: there is nothing to sum, and linears may add to the residual themselves."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


LOCAL = LocalReduction()


class Columns(Reduction):
    """Joins the columns of a linear whose outputs are divided in order.

    Args:
        reduction: of the ranks.
        own: this rank's columns, of `count`. The last ranks have fewer where ranks do not divide them.
    """

    def __init__(self, reduction: Reduction, own: range, count: int) -> None:
        self.reduction, self.own, self.count, self.size = reduction, own, count, reduction.size

    @property
    def least(self) -> int:
        """The least number of columns that a rank has."""
        return self.count - (self.size - 1) * -(-self.count // self.size)

    def sum(self, x: Tensor) -> Tensor:
        """Return all columns [..., count] from this rank's."""
        most = -(-self.count // self.size)
        columns = self.gather(functional.pad(x, (0, most - len(self.own))) if most > len(self.own) else x)
        return columns if most * self.size == self.count else columns[..., : self.count].contiguous()

    def gather(self, x: Tensor) -> Tensor:
        return self.reduction.gather(x)

    def rows_of(self, rows: Tensor, order: list[int]) -> Tensor:
        """Return rows order[i] of all ranks' rows of a weight or bias, from this rank's."""
        index = torch.tensor(order, device=rows.device) - self.own.start
        is_own = (index >= 0) & (index < len(self.own))
        picked = rows[index.clamp(0, len(self.own) - 1)]
        picked[~is_own] = 0
        return self.reduction.sum(picked)


def reduction_of(module: Any) -> Reduction:
    """Return the reduction of a module's outputs; the local one of modules that are not divided."""
    reduction: Reduction = getattr(module, "reduction", LOCAL)
    return reduction
