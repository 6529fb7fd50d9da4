"""Outputs of a layer's part that are not summed yet, so that the next norm can sum them in its own launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...ops import moe_combine
from .reduction import Reduction


class ExpertOutputs(NamedTuple):
    """The outputs of the top-k experts of each row, and their routing weights."""

    outputs: Tensor  # [T * top_k, H], those of a row next to each other
    weights: Tensor  # [T, top_k] float32

    def combine(self) -> Tensor:
        """Return the weighted sums [T, H], accumulated in float32."""
        out: Tensor
        if self.outputs.is_cuda:
            out = moe_combine(self.outputs, self.weights)
        else:
            rows, top_k = self.weights.shape
            out = (self.outputs.view(rows, top_k, -1) * self.weights[..., None]).sum(1).to(self.outputs.dtype)
        return out


class PartialSum(NamedTuple):
    """This rank's part of a sum over ranks."""

    partial: Tensor  # [T, H]
    reduction: Reduction

    def combine(self) -> Tensor:
        """Return the sum [T, H]."""
        return self.reduction.sum(self.partial)


LayerOutput = Tensor | ExpertOutputs | PartialSum


def added(x: LayerOutput, y: LayerOutput) -> LayerOutput:
    """Return x + y. Partial sums stay one, which takes one reduction."""
    if isinstance(x, PartialSum) and isinstance(y, PartialSum) and x.reduction is y.reduction:
        return x._replace(partial=x.partial + y.partial)
    return combined(x) + combined(y)


def combined(x: LayerOutput) -> Tensor:
    """Return x itself, or the sum that it stands for."""
    return x if isinstance(x, Tensor) else x.combine()


def select_rows(indices: Tensor, x: LayerOutput) -> Any:
    """Return a copy of some rows of x, of the same kind."""
    if isinstance(x, ExpertOutputs):
        outputs = x.outputs.view(*x.weights.shape, -1)[indices]
        return ExpertOutputs(outputs.flatten(0, 1), x.weights[indices])
    if isinstance(x, PartialSum):
        return x._replace(partial=x.partial[indices])
    return x[indices]
