"""Weights quantized to 8 and 4 bits, and GEMMs with them.

Results have one definition on every device. A weight is its elements times scales. Where a format quantizes activations
too, every row is quantized by scales of its own, so that no row depends on others in the batch. Both are dequantized
to the rows' dtype and multiplied: exactly in float32, with one more rounding of each in 16 bits. On a GPU, kernels
without that rounding take over: `small_m_gemm` for few rows on Hopper, and for 8 bits one of torch's that has been
verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import _C
from ...ops import dequantize, silu_and_mul, small_m_gemm
from .fp8 import (
    FP8,
    GROUP,
    LARGEST,
    Kernel,
    QuantizedActivations,
    column_major,
    scaled_by_groups,
    scaled_by_rows,
    verified_kernel,
)

WORDS = 256  # 4-bit columns that are ordered together
ROWS_AT_ONCE = 4096  # of a weight that is quantized, each in float32 meanwhile


class QuantizedWeight(ABC):
    """A weight [out, in] of less than 16 bits an element."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Out and in."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return [out, in] float32."""

    def linear(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        """Return [..., out] from [..., in]; gated: silu(gate) * up [rows, out / 2] from [rows, in]."""
        out = self.matmul(x)
        out = out if bias is None else out + bias
        return silu_and_mul(out) if gated else out

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return [..., out] from [..., in], without a bias."""

    @abstractmethod
    def plan(self, x: Tensor) -> str:
        """Return what multiplies x [..., in]: "dequantized" for the definition, or a kernel's name."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its elements, scales and zeros."""

    @property
    def device(self) -> torch.device:
        """The device of its elements."""
        raise NotImplementedError

    def concatenated(self, other: QuantizedWeight) -> QuantizedWeight | None:
        """Return both as one weight, this one's rows first; None where one weight cannot hold both."""
        return None

    def slice_rows(self, begin: int, end: int) -> QuantizedWeight:
        """Return a weight of these rows, which shares their storage."""
        raise NotImplementedError

    def pick_rows(self, rows: Tensor) -> QuantizedWeight:
        """Return a weight of copies of these rows."""
        raise NotImplementedError

    def slice_columns(self, own: range) -> QuantizedWeight:
        """Return a weight of copies of these columns.

        Raises:
            ValueError: they begin or end within a group of columns with one scale.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """Elements of float8_e4m3fn, with a scale for each row, or for each 128 elements of each row.

    Attributes:
        qweight: [out, in] float8_e4m3fn.
        scales: [out, 1] or [out, blocks] float32.
        activations: how x is quantized: "none", "token" (a scale for each row), "group" (for each 128 elements of a
            row), or "static" (the checkpoint's).
        input_scale: [1] float32, for "static".
    """

    qweight: Tensor
    scales: Tensor
    activations: str
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.qweight.is_cuda:  # kernels are verified here, not while a graph is captured
            self.torch_kernel(self.qweight, torch.bfloat16)

    @classmethod
    def of_rows(cls, weight: Tensor) -> Fp8Weight:
        """Quantize a weight [out, in] with a scale for each row, for activations with one for each row of theirs."""
        weight, least = weight.detach(), torch.finfo(torch.float32).tiny
        qweight = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        parts = (torch.split(part, ROWS_AT_ONCE) for part in (weight, qweight, scales))
        for rows, quantized, scale in zip(*parts, strict=True):
            rows = rows.float()
            scale.copy_((rows.abs().amax(1, keepdim=True) / LARGEST).clamp(min=least))
            quantized.copy_(rows / scale)
        return cls(qweight, scales, "token")

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[0], self.qweight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    def dequantize(self) -> Tensor:
        return self._dequantize(torch.float32)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        return dequantize_weight(self.qweight, self.scales, dtype)

    def linear(self, x: Tensor | QuantizedActivations, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if self.activations == "none":
            assert isinstance(x, Tensor)
            return super().linear(x, bias, gated)
        if isinstance(x, QuantizedActivations):
            shape, rows = x.values.shape, x
        else:
            shape, rows = x.shape, QuantizedActivations.quantize(x, self.activations, self.input_scale)
        if self._is_small(rows, gated):
            outs, device = self.shape[0] // 2 if gated else self.shape[0], rows.values.device
            out = torch.empty(len(rows.values), outs, dtype=rows.dtype, device=device)
            small_m_gemm(
                rows.values,
                self.qweight,
                bias,
                x_scales=rows.scales,
                weight_scales=self.scales.t(),
                gated=gated,
                out=out,
            )
        else:
            out = self._matmul(rows)
            out = out if bias is None else out + bias
            out = silu_and_mul(out) if gated else out
        return out.view(*shape[:-1], -1)

    def matmul(self, x: Tensor) -> Tensor:
        if self.activations == "none":
            return functional.linear(x, self._dequantize(x.dtype))
        rows = QuantizedActivations.quantize(x, self.activations, self.input_scale)
        return self._matmul(rows).view(*x.shape[:-1], -1)

    def _matmul(self, rows: QuantizedActivations) -> Tensor:
        kernel = self.torch_kernel(rows.values, rows.dtype)
        if kernel is None:
            return functional.linear(rows.dequantize(), self._dequantize(rows.dtype))
        return kernel(rows.values, rows.scales, self.qweight, self.scales)

    def plan(self, x: Tensor) -> str:
        if self.activations == "none":
            return "dequantized"
        rows = QuantizedActivations.quantize(x, self.activations, self.input_scale)
        kernel = self.torch_kernel(x, x.dtype)
        return "small_m_gemm" if self._is_small(rows, False) else "dequantized" if kernel is None else kernel.__name__

    def _is_small(self, rows: QuantizedActivations, gated: bool) -> bool:
        """Return whether `small_m_gemm` multiplies: few rows, on Hopper, by a weight with groups like the rows'."""
        groups, aligned = self.scales.shape[1], self.scales.data_ptr() % 16 == 0
        alike = groups == 1 if self.activations in ("token", "static") else groups * GROUP == self.shape[1]
        if not (alike and aligned and self.scales.stride(0) == 1) or rows.dtype == torch.float32:
            return False
        return _C.small_m_gemm_plan(rows.values, self.qweight, gated) != "library"

    @property
    def nbytes(self) -> int:
        return self.qweight.nbytes + self.scales.nbytes

    def torch_kernel(self, x: Tensor, dtype: torch.dtype) -> Kernel | None:
        """Return torch's kernel for rows of a dtype on x's device, if this GPU and this torch have one."""
        if not x.is_cuda or dtype != torch.bfloat16 or any(size % 16 for size in self.shape):
            return None
        if self.scales.shape[1] == 1 and self.activations in ("token", "static"):
            return verified_kernel(scaled_by_rows, x.device.index)
        if self.activations == "group" and self.scales.shape[1] * GROUP == self.shape[1]:
            return verified_kernel(scaled_by_groups, x.device.index)
        return None

    def slice_rows(self, begin: int, end: int) -> QuantizedWeight:
        return replace(self, qweight=self.qweight[begin:end], scales=self.scales[begin:end])

    def pick_rows(self, rows: Tensor) -> QuantizedWeight:
        qweight = self.qweight.view(torch.uint8)[rows].view(FP8)
        return replace(self, qweight=qweight, scales=column_major(self.scales[rows]))

    def slice_columns(self, own: range) -> QuantizedWeight:
        qweight = self.qweight[:, own.start : own.stop].contiguous()
        groups = groups_of(own, self.scales.shape[1], self.shape[1], GROUP)
        return replace(self, qweight=qweight, scales=column_major(self.scales[:, groups]))

    def concatenated(self, other: QuantizedWeight) -> QuantizedWeight | None:
        if not isinstance(other, Fp8Weight) or other.activations != self.activations:
            return None
        if self.scales.shape[1] != other.scales.shape[1]:
            return None
        if not _equal(self.input_scale, other.input_scale):
            return None
        return replace(
            self,
            qweight=torch.cat([self.qweight.view(torch.uint8), other.qweight.view(torch.uint8)]).view(FP8),
            scales=column_major(torch.cat([self.scales, other.scales])),
        )


@dataclass(frozen=True)
class Int4Weight(QuantizedWeight):
    """Elements from 0 to 15, in groups of columns with a zero and a scale for each row; activations stay as they are.

    Attributes:
        qweight: [out, in / 2] uint8, in the order of `pack_int4`.
        scales: [out, groups] float32, whose four lowest bits are the group's zero; groups are equally long and
            contiguous.
        order: [in] int32, the source column of each of the groups' columns; None: as they are.
    """

    qweight: Tensor
    scales: Tensor
    order: Tensor | None = None

    @classmethod
    def pack(cls, elements: Tensor, zeros: Tensor, scales: Tensor, columns: Tensor | None = None) -> Int4Weight:
        """Pack elements [out, in], and zeros and scales [out, groups].

        `columns` [in] gives the group of each column where groups are not contiguous.

        Raises:
            ValueError: groups of different lengths.
        """
        order = None
        if columns is not None:
            if (columns.bincount(minlength=scales.shape[1]) * scales.shape[1] != len(columns)).any():
                raise ValueError("groups of different lengths, expected equal ones")
            order = columns.argsort(stable=True).int()
            elements = elements[:, order.long()]
        bits = (scales.float().view(torch.int32) & ~15) | zeros.int()
        return cls(pack_int4(elements), column_major(bits.view(torch.float32)), order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[0], 2 * self.qweight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    def dequantize(self) -> Tensor:
        weight = dequantize_weight(self.qweight, self.scales, torch.float32)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def linear(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if not self._is_small(x, gated):
            return super().linear(x, bias, gated)
        rows = self._reordered(x).reshape(-1, x.shape[-1])
        out: Tensor = small_m_gemm(rows, self.qweight, bias, weight_scales=self.scales.t(), gated=gated)
        return out.view(*x.shape[:-1], -1)

    def matmul(self, x: Tensor) -> Tensor:
        return functional.linear(self._reordered(x), dequantize_weight(self.qweight, self.scales, x.dtype))

    def plan(self, x: Tensor) -> str:
        return "small_m_gemm" if self._is_small(x, False) else "dequantized"

    def _reordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def _is_small(self, x: Tensor, gated: bool) -> bool:
        """Return whether `small_m_gemm` multiplies: few rows, on Hopper, by groups of 128 or whole rows."""
        if self.scales.shape[1] not in (1, self.shape[1] // GROUP) or self.shape[1] % WORDS:
            return False
        if self.scales.data_ptr() % 16 or self.scales.stride(0) != 1:
            return False
        return _C.small_m_gemm_plan(x, self.qweight, gated) != "library"

    @property
    def nbytes(self) -> int:
        return self.qweight.nbytes + self.scales.nbytes

    def concatenated(self, other: QuantizedWeight) -> QuantizedWeight | None:
        if not isinstance(other, Int4Weight) or self.scales.shape[1] != other.scales.shape[1]:
            return None
        if not _equal(self.order, other.order):
            return None
        return replace(
            self,
            qweight=torch.cat([self.qweight, other.qweight]),
            scales=column_major(torch.cat([self.scales, other.scales])),
        )

    def slice_rows(self, begin: int, end: int) -> QuantizedWeight:
        return replace(self, qweight=self.qweight[begin:end], scales=self.scales[begin:end])

    def pick_rows(self, rows: Tensor) -> QuantizedWeight:
        return replace(self, qweight=self.qweight[rows], scales=column_major(self.scales[rows]))

    def slice_columns(self, own: range) -> QuantizedWeight:
        if self.order is not None:
            raise ValueError("columns are in no group of neighbors (desc_act), expected groups that can be divided")
        count, groups = self.shape[1], self.scales.shape[1]
        kept = groups_of(own, groups, count, count // groups)
        elements = unpack_int4(self.qweight)[:, own.start : own.stop]
        return replace(self, qweight=pack_int4(elements), scales=column_major(self.scales[:, kept]))


def groups_of(own: range, groups: int, columns: int, size: int) -> slice:
    """Return the groups of a range of columns; with one group for all, that one.

    Raises:
        ValueError: the range begins or ends within a group, and not with the last column.
    """
    if groups == 1:
        return slice(0, 1)
    if own.start % size or (own.stop % size and own.stop != columns):
        raise ValueError(f"columns {own.start} to {own.stop} cut a group of {size}, expected whole groups")
    return slice(own.start // size, -(-own.stop // size))


def dequantize_weight(qweight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [out, in] from a weight's elements and its scales [out, groups]."""
    out: Tensor = dequantize(qweight, scales.t().contiguous(), dtype=str(dtype).removeprefix("torch."))
    return out


def pack_int4(elements: Tensor) -> Tensor:
    """Pack [rows, n] elements of four bits into [rows, n / 2] uint8.

    Each 256 columns are ordered as the tensor-core fragments of `small_m_gemm`. For other n, neighbors share a byte,
    the first in its lower half.
    """
    if elements.shape[1] % WORDS == 0:  # halves, words, steps, eights, fours, neighbors
        elements = elements.view(len(elements), -1, 2, 4, 2, 2, 4, 2).permute(0, 1, 2, 6, 3, 7, 4, 5).flatten(1)
    return elements[:, ::2] | (elements[:, 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the elements [rows, n] that `pack_int4` has packed."""
    elements = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    if elements.shape[1] % WORDS == 0:
        elements = elements.view(len(elements), -1, 2, 4, 4, 2, 2, 2).permute(0, 1, 2, 4, 6, 7, 3, 5).flatten(1)
    return elements


@dataclass(frozen=True)
class ConcatenatedWeights(QuantizedWeight):
    """Weights of one input that cannot become a single one; their outputs are concatenated."""

    parts: tuple[QuantizedWeight | Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantize(self) -> Tensor:
        return torch.cat(
            [part.dequantize() if isinstance(part, QuantizedWeight) else part.float() for part in self.parts]
        )

    def matmul(self, x: Tensor) -> Tensor:
        parts = self.parts
        outs = [p.linear(x) if isinstance(p, QuantizedWeight) else functional.linear(x, p) for p in parts]
        return torch.cat(outs, -1)

    def plan(self, x: Tensor) -> str:
        return " + ".join(part.plan(x) if isinstance(part, QuantizedWeight) else "16 bits" for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def fuse_weights(linears: Sequence[nn.Linear | QuantizedLinear]) -> QuantizedWeight:
    """Fuse the weights of linears, at least one of them quantized.

    Weights that all fit together become one, and the modules keep slices of it.
    """
    fused = getattr(linears[0], "fused", None)
    if fused is not None and all(getattr(linear, "fused", None) is fused for linear in linears):
        stored: QuantizedWeight = fused[0]
        return stored  # by another engine on the same modules, or by this one before
    weights = [linear.weight if isinstance(linear, QuantizedLinear) else linear.weight.detach() for linear in linears]
    whole, *others = weights
    for weight in others:
        both = None
        if isinstance(whole, QuantizedWeight) and isinstance(weight, QuantizedWeight):
            both = whole.concatenated(weight)
        if both is None:
            return ConcatenatedWeights(tuple(weights))
        whole = both
    assert isinstance(whole, QuantizedWeight)
    begin = 0
    for linear, weight in zip(linears, weights, strict=True):
        assert isinstance(linear, QuantizedLinear)
        linear.store(whole.slice_rows(begin, begin + weight.shape[0]))
        begin += weight.shape[0]
    fused = (whole,)
    for linear in linears:
        linear.fused = fused
    return whole


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


class QuantizedLinear(nn.Module):
    """Replaces an `nn.Linear` of a transformers module, for our layers and for its own forward pass.

    Elements and scales are buffers, so that no cast of the module reaches them.
    """

    kinds: ClassVar[tuple[type[Any], ...]] = (Fp8Weight, Int4Weight)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._kind: type[Any] | None = None
        self._options: dict[str, Any] = {}
        self.fused: tuple[QuantizedWeight] | None = None  # the weight that this one is a slice of

    def store(self, weight: QuantizedWeight) -> None:
        """Replace the weight."""
        assert isinstance(weight, self.kinds)
        self._kind, self._options, self.fused = type(weight), {}, None
        for field in fields(weight):
            value = getattr(weight, field.name)
            if isinstance(value, Tensor):
                self.register_buffer(field.name, value, persistent=False)
            else:
                self._options[field.name] = value

    @property
    def weight(self) -> QuantizedWeight:
        assert self._kind is not None
        stored: QuantizedWeight = self._kind(**self._options, **dict(self.named_buffers(recurse=False)))
        return stored

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.linear(x, self.bias)


def quantized_rows(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose linears are quantized by `Fp8Weight.of_rows`; it shares all other parameters."""
    if type(module) is nn.Linear:
        stored = QuantizedLinear(module)
        stored.store(Fp8Weight.of_rows(module.weight))
        return stored
    clone = copy(module)
    clone._modules = {name: part and quantized_rows(part) for name, part in module._modules.items()}
    return clone
