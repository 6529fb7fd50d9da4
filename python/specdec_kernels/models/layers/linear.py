"""Linear layers with our kernels where they are faster, and fused ones that read their input once.

Linears hold tensors that they share with the modules they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import _C
from ...ops import silu_and_mul, small_m_gemm
from .divided_logits import DividedLogits
from .fp8 import QuantizedActivations
from .outputs import PartialSum
from .quantized import Fp8Weight, QuantizedLinear, QuantizedWeight, fuse_weights
from .reduction import LOCAL, Columns, Reduction, reduction_of


class Projection(Protocol):
    """Computes a projection, such as queries, keys and values."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return [..., out] from [..., in]."""


class Linear(NamedTuple):
    """A weight [out, in], dense or quantized, and a bias.

    If its inputs are divided among ranks, `reduction` sums their partial outputs.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    reduction: Reduction = LOCAL

    def __call__(self, x: Tensor | QuantizedActivations) -> Tensor:
        """Return [..., out] from [..., in]."""
        return self.reduction.sum(self._partial(x))

    def _partial(self, x: Tensor | QuantizedActivations) -> Tensor:
        """Return this rank's part of the output."""
        if isinstance(x, QuantizedActivations):
            assert isinstance(self.weight, Fp8Weight)
            return self.weight.linear(x, self.bias)
        if not isinstance(self.weight, Tensor):
            return self.weight.linear(x, self.bias)
        return self._small_m_gemm(x) if self._is_small(x) else functional.linear(x, self.weight, self.bias)

    def divided(self, x: Tensor) -> Tensor | DividedLogits:
        """Return the output for x [..., in], or this rank's columns of it if outputs are divided."""
        if isinstance(columns := self.reduction, Columns):
            return DividedLogits(self._partial(x), columns)
        return self(x)

    def swiglu(self, x: Tensor | QuantizedActivations) -> Tensor:
        """Return silu(gate) * up [rows, out / 2] from x [rows, in], for a fused gate and up projection."""
        if isinstance(x, QuantizedActivations):
            assert isinstance(self.weight, Fp8Weight)
            return self.weight.linear(x, self.bias, gated=True)
        if not isinstance(self.weight, Tensor):
            return self.weight.linear(x, self.bias, gated=True)
        if self._is_small(x, gated=True):
            return self._small_m_gemm(x, gated=True)
        out: Tensor = silu_and_mul(functional.linear(x, self.weight, self.bias))
        return out

    def unreduced(self, x: Tensor) -> Tensor | PartialSum:
        """Return the output for x [rows, in], a partial sum if inputs are divided among ranks."""
        return self(x) if self.reduction is LOCAL else PartialSum(self._partial(x), self.reduction)

    def add_to(self, residual: Tensor | None, x: Tensor) -> tuple[Tensor | PartialSum, Tensor | None]:
        """Return the output for x [rows, in] and the residual that is still to be added to it, [rows, out] each.

        Where cuBLAS multiplies, it adds too: the sum is written over the residual and returned with None. With inputs
        divided among ranks the output is a partial sum, which the next norm reduces.
        """
        if self.reduction is not LOCAL:
            return self.unreduced(x), residual
        by_cublas = x.is_cuda and not self._is_small(x) and isinstance(self.weight, Tensor)
        if residual is None or self.bias is not None or not by_cublas:
            return self(x), residual
        assert isinstance(self.weight, Tensor)
        return residual.addmm_(x, self.weight.t()), None

    def _is_small(self, x: Tensor, gated: bool = False) -> bool:
        """Return whether `small_m_gemm` is faster than torch, which is cuBLAS on a GPU."""
        return isinstance(self.weight, Tensor) and _C.small_m_gemm_plan(x, self.weight, gated) != "library"

    def _small_m_gemm(self, x: Tensor, gated: bool = False) -> Tensor:
        out: Tensor = small_m_gemm(x.reshape(-1, x.shape[-1]), self.weight, self.bias, gated=gated)
        return out.view(*x.shape[:-1], -1)

    def permute_outputs(self, order: list[int]) -> Linear:
        """Return a copy whose output i is output order[i], or 0 where that is -1."""
        assert isinstance(self.weight, Tensor)
        if isinstance(columns := self.reduction, Columns):
            bias = None if self.bias is None else columns.rows_of(self.bias, order)
            return Linear(columns.rows_of(self.weight, order), bias)
        return Linear(permuted(self.weight, order), None if self.bias is None else permuted(self.bias, order))

    def permute_inputs(self, order: list[int]) -> Linear:
        """Return a copy whose input i is input order[i], or ignored where that is -1."""
        assert isinstance(self.weight, Tensor)
        return self._replace(weight=permuted(self.weight.t(), order).t().contiguous())


class Projections(Protocol):
    """Computes several projections of one input."""

    def __call__(self, x: Tensor, /) -> Sequence[Tensor]:
        """Return [..., out] of each from [..., in]."""


class SplitProjection(NamedTuple):
    """Several projections of one input as one."""

    whole: Projection
    sizes: tuple[int, ...]  # of the outputs, which are next to each other; what follows them is left out

    def __call__(self, x: Tensor, /) -> Sequence[Tensor]:
        return torch.split(self.whole(x)[..., : sum(self.sizes)], list(self.sizes), dim=-1)


class SeparateProjections(NamedTuple):
    """Projections of one input that cannot be one, such as those of different dtypes."""

    parts: tuple[Projections, ...]

    def __call__(self, x: Tensor, /) -> Sequence[Tensor]:
        return [out for part in self.parts for out in part(x)]


def permuted(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the tensor's rows order[i], zeros for -1."""
    index = torch.tensor(order, device=tensor.device)
    rows = tensor[index.clamp(min=0)]
    rows[index < 0] = 0
    return rows


def linear_of(linear: nn.Linear | QuantizedLinear) -> Linear:
    """Return the `Linear` that shares a module's weight and bias, with its reduction if inputs are divided."""
    weight = linear.weight if isinstance(linear, QuantizedLinear) else linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    return Linear(weight, bias, reduction_of(linear))


def fused(*linears: nn.Linear | QuantizedLinear) -> Linear:
    """Fuse linears of one input (query, key and value; gate and up) into one, without a second copy of the weights.

    The modules keep their parameters, whose data become slices of the fused tensors. If they already are, because
    another engine has fused the same modules, nothing is copied. Quantized weights keep their scales.
    """

    def fuse(name: str) -> Tensor | None:
        parts = _tensors(name, linears)
        whole = contiguous_view([part.data for part in parts]) if parts else None
        if whole is None and parts:
            with torch.inference_mode(False):  # the module may be trained later, whatever mode the caller is in
                whole = torch.cat([part.data for part in parts])
                for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
                    part.data = rows
        return whole

    if any(isinstance(linear, QuantizedLinear) for linear in linears):
        return Linear(fuse_weights(linears), fuse("bias"))
    weight = fuse("weight")
    assert weight is not None
    return Linear(weight, fuse("bias"))


def concatenated(*linears: nn.Linear) -> Linear:
    """Return a fused linear of a copy of the weights; the modules stay as they are."""
    weight, bias = ([part.detach() for part in _tensors(name, linears)] for name in ("weight", "bias"))
    return Linear(torch.cat(weight), torch.cat(bias) if bias else None)


def _tensors(name: str, linears: Sequence[nn.Linear | QuantizedLinear]) -> list[Tensor]:
    """Return the weights or biases of all modules; none where no module has one."""
    parts = [getattr(linear, name) for linear in linears]
    if all(part is None for part in parts):
        return []
    if any(part is None for part in parts):
        raise ValueError(f"model: {name} is missing in some of the projections that are fused, expected all or none")
    return parts


def contiguous_view(parts: list[Tensor]) -> Tensor | None:
    """Return the tensor whose consecutive rows the parts are; None where they are not."""
    first = parts[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if (part.untyped_storage().data_ptr(), part.storage_offset()) != (storage, offset) or not part.is_contiguous():
            return None
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
