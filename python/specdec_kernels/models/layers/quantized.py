"""Weights of 8 and 4 bits, and products with them.

What is computed is a definition, the same on every device. A weight is numbers times scales. Where a format says that
activations are rounded too, every row is, by scales of its own, so that no row depends on the others beside it. Both
become numbers of the rows' dtype and are multiplied: exactly so in float32, in 16 bits with one more rounding of each.
On a GPU kernels that leave that rounding out stand for it: `small_m_gemm` for few rows on Hopper, and for 8 bits one of
torch where, tried once, it gives what it should.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import _C
from ...ops import dequantize, quantize_fp8, silu_and_mul, small_m_gemm

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
GROUP = 128  # numbers of a row that share a scale, and rows and columns of a block of a weight
WORDS = 256  # columns of 4 bits that are ordered together
KERNEL_ERROR = 2e-2  # of a kernel's results, which are bfloat16, against the definition's


class RoundedRows(NamedTuple):
    """Rows in 8 bits, which stand for rows of a dtype in products that would round these."""

    numbers: Tensor  # [T, in] float8_e4m3fn
    scales: Tensor  # [1, T] or [groups, T] float32
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, activations: str, input_scale: Tensor | None = None) -> RoundedRows:
        """Of rows [..., in], as `Fp8Weight.activations` says."""
        return cls(*in_eight_bits(x.reshape(-1, x.shape[-1]), activations, input_scale), x.dtype)

    def widened(self) -> Tensor:
        """[T, in] of the dtype."""
        return (self.numbers.float() * spread(self.scales.t(), self.numbers.shape[1])).to(self.dtype)


class StoredWeight(ABC):
    """A weight [out, in] that is stored in fewer bits."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Out and in."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """[out, in] float32."""

    def product(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        """[..., out] from [..., in]; gated, [rows, out / 2] from [rows, in], of a gate and then what it gates."""
        out = self.multiplied(x)
        out = out if bias is None else out + bias
        return silu_and_mul(out) if gated else out

    @abstractmethod
    def multiplied(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in]."""

    @abstractmethod
    def plan(self, x: Tensor) -> str:
        """What multiplies x [..., in]: "widened" by the definition, or the name of a kernel."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of its numbers, scales and zeros."""

    def joined(self, other: StoredWeight) -> StoredWeight | None:
        """Both as one weight, the rows of this one first; None where one weight cannot be both."""
        return None

    def rows(self, begin: int, end: int) -> StoredWeight:
        """These of its rows, which it shares."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8Weight(StoredWeight):
    """Numbers of float8_e4m3fn, with a scale for each row, or for each block of 128 numbers of each row.

    Attributes:
        numbers: [out, in] float8_e4m3fn.
        scales: [out, 1] or [out, blocks] float32.
        activations: how x is rounded: "none", "token" (a scale of each row), "group" (of each 128 numbers of a row), or
            "static" (the checkpoint's).
        input_scale: [1] float32, of "static".
    """

    numbers: Tensor
    scales: Tensor
    activations: str
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def dequantised(self) -> Tensor:
        return self._widened(torch.float32)

    def _widened(self, dtype: torch.dtype) -> Tensor:
        return widened(self.numbers, self.scales, dtype)

    def product(self, x: Tensor | RoundedRows, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if self.activations == "none":
            assert isinstance(x, Tensor)
            return super().product(x, bias, gated)
        shape = x.numbers.shape if isinstance(x, RoundedRows) else x.shape
        rows = x if isinstance(x, RoundedRows) else RoundedRows.of(x, self.activations, self.input_scale)
        if self._is_ours(rows, gated):
            outs, device = self.shape[0] // 2 if gated else self.shape[0], rows.numbers.device
            out = torch.empty(len(rows.numbers), outs, dtype=rows.dtype, device=device)
            numbers, of_weight = rows.numbers, self.scales.t()
            small_m_gemm(
                numbers, self.numbers, bias, x_scales=rows.scales, weight_scales=of_weight, gated=gated, out=out
            )
        else:
            out = self._multiplied(rows)
            out = out if bias is None else out + bias
            out = silu_and_mul(out) if gated else out
        return out.view(*shape[:-1], -1)

    def multiplied(self, x: Tensor) -> Tensor:
        if self.activations == "none":
            return functional.linear(x, self._widened(x.dtype))
        return self._multiplied(RoundedRows.of(x, self.activations, self.input_scale)).view(*x.shape[:-1], -1)

    def _multiplied(self, rows: RoundedRows) -> Tensor:
        kernel = self.torch_kernel(rows.numbers, rows.dtype)
        if kernel is None:
            return functional.linear(rows.widened(), self._widened(rows.dtype))
        return kernel(rows.numbers, rows.scales, self.numbers, self.scales)

    def plan(self, x: Tensor) -> str:
        if self.activations == "none":
            return "widened"
        rows = RoundedRows.of(x, self.activations, self.input_scale)
        kernel = self.torch_kernel(x, x.dtype)
        return "small_m_gemm" if self._is_ours(rows, False) else "widened" if kernel is None else kernel.__name__

    def _is_ours(self, rows: RoundedRows, gated: bool) -> bool:
        """Whether `small_m_gemm` multiplies: few rows, on Hopper, by a weight whose groups are those of the rows."""
        groups, aligned = self.scales.shape[1], self.scales.data_ptr() % 16 == 0
        rounds_alike = groups == 1 if self.activations in ("token", "static") else groups * GROUP == self.shape[1]
        if not (rounds_alike and aligned and self.scales.stride(0) == 1) or rows.dtype == torch.float32:
            return False
        return _C.small_m_gemm_plan(rows.numbers, self.numbers, gated) != "library"

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def torch_kernel(self, x: Tensor, dtype: torch.dtype) -> Kernel | None:
        """A kernel of torch for rows of a dtype where x is, which this GPU and this torch have."""
        if not x.is_cuda or dtype != torch.bfloat16 or any(size % 16 for size in self.shape):
            return None
        if self.scales.shape[1] == 1 and self.activations in ("token", "static"):
            return trusted(scaled_by_rows, x.device.index)
        if self.activations == "group" and self.scales.shape[1] * GROUP == self.shape[1]:
            return trusted(scaled_by_groups, x.device.index)
        return None

    def rows(self, begin: int, end: int) -> StoredWeight:
        return replace(self, numbers=self.numbers[begin:end], scales=self.scales[begin:end])

    def __post_init__(self) -> None:
        if self.numbers.is_cuda:  # kernels are tried here, not where a graph is captured
            self.torch_kernel(self.numbers, torch.bfloat16)

    def joined(self, other: StoredWeight) -> StoredWeight | None:
        if not isinstance(other, Fp8Weight) or other.activations != self.activations:
            return None
        if self.scales.shape[1] != other.scales.shape[1]:
            return None
        if not same(self.input_scale, other.input_scale):
            return None
        return replace(
            self,
            numbers=torch.cat([self.numbers.view(torch.uint8), other.numbers.view(torch.uint8)]).view(FP8),
            scales=by_columns(torch.cat([self.scales, other.scales])),
        )


@dataclass(frozen=True)
class Int4Weight(StoredWeight):
    """Numbers from 0 to 15, whose groups of columns in each row have a zero and a scale; activations stay as they are.

    Attributes:
        numbers: [out, in / 2] uint8, as `in_words` orders them.
        scales: [out, groups] float32, whose four lowest bits are the number that stands for 0; groups are equally long,
            one behind another.
        order: [in] int32, where the groups' columns are taken from; None: as they are.
    """

    numbers: Tensor
    scales: Tensor
    order: Tensor | None = None

    @classmethod
    def of(cls, numbers: Tensor, zeros: Tensor, scales: Tensor, columns: Tensor | None = None) -> Int4Weight:
        """Of numbers [out, in], and zeros and scales [out, groups]; `columns` [in] are columns' groups where these do
        not stand one behind another.

        Raises:
            ValueError: groups of different lengths.
        """
        order = None
        if columns is not None:
            if (columns.bincount(minlength=scales.shape[1]) * scales.shape[1] != len(columns)).any():
                raise ValueError("groups of different lengths, expected equal ones")
            order = columns.argsort(stable=True).int()
            numbers = numbers[:, order.long()]
        bits = (scales.float().view(torch.int32) & ~15) | zeros.int()
        return cls(in_words(numbers), by_columns(bits.view(torch.float32)), order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], 2 * self.numbers.shape[1]

    def dequantised(self) -> Tensor:
        means = widened(self.numbers, self.scales, torch.float32)
        if self.order is None:
            return means
        return torch.empty_like(means).index_copy_(1, self.order.long(), means)

    def product(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if not self._is_ours(x, gated):
            return super().product(x, bias, gated)
        rows = self._taken(x).reshape(-1, x.shape[-1])
        out: Tensor = small_m_gemm(rows, self.numbers, bias, weight_scales=self.scales.t(), gated=gated)
        return out.view(*x.shape[:-1], -1)

    def multiplied(self, x: Tensor) -> Tensor:
        return functional.linear(self._taken(x), widened(self.numbers, self.scales, x.dtype))

    def plan(self, x: Tensor) -> str:
        return "small_m_gemm" if self._is_ours(x, False) else "widened"

    def _taken(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def _is_ours(self, x: Tensor, gated: bool) -> bool:
        """Whether `small_m_gemm` multiplies: few rows, on Hopper, by groups of 128 or whole rows."""
        if self.scales.shape[1] not in (1, self.shape[1] // GROUP) or self.shape[1] % WORDS:
            return False
        if self.scales.data_ptr() % 16 or self.scales.stride(0) != 1:
            return False
        return _C.small_m_gemm_plan(x, self.numbers, gated) != "library"

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def joined(self, other: StoredWeight) -> StoredWeight | None:
        if not isinstance(other, Int4Weight) or self.scales.shape[1] != other.scales.shape[1]:
            return None
        if not same(self.order, other.order):
            return None
        return replace(
            self,
            numbers=torch.cat([self.numbers, other.numbers]),
            scales=by_columns(torch.cat([self.scales, other.scales])),
        )

    def rows(self, begin: int, end: int) -> StoredWeight:
        return replace(self, numbers=self.numbers[begin:end], scales=self.scales[begin:end])


def widened(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in] of a weight's numbers and its scales [out, groups]."""
    out: Tensor = dequantize(numbers, scales.t().contiguous(), dtype=str(dtype).removeprefix("torch."))
    return out


def in_words(numbers: Tensor) -> Tensor:
    """[rows, n / 2] uint8 of [rows, n] numbers of four bits: each 256 columns as `small_m_gemm` takes them, for tensor
    cores; of another n, neighbours in a byte, the first in its lower half."""
    if numbers.shape[1] % WORDS == 0:  # halves, words, steps, eights, fours, neighbours
        numbers = numbers.view(len(numbers), -1, 2, 4, 2, 2, 4, 2).permute(0, 1, 2, 6, 3, 7, 4, 5).flatten(1)
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


@dataclass(frozen=True)
class SeveralWeights(StoredWeight):
    """Weights of one input that no single one can be: their products stand side by side."""

    parts: tuple[StoredWeight | Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantised(self) -> Tensor:
        return torch.cat(
            [part.dequantised() if isinstance(part, StoredWeight) else part.float() for part in self.parts]
        )

    def multiplied(self, x: Tensor) -> Tensor:
        return torch.cat(
            [part.product(x) if isinstance(part, StoredWeight) else functional.linear(x, part) for part in self.parts],
            -1,
        )

    def plan(self, x: Tensor) -> str:
        return " + ".join(part.plan(x) if isinstance(part, StoredWeight) else "16 bits" for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def stored_together(linears: Sequence[nn.Linear | QuantisedLinear]) -> StoredWeight:
    """One weight of the linears', of which one at least is stored in fewer bits: those that all fit become one, whose
    rows the modules have from then on."""
    of_all = getattr(linears[0], "whole", None)
    if of_all is not None and all(getattr(linear, "whole", None) is of_all for linear in linears):
        stored: StoredWeight = of_all[0]
        return stored  # of another engine on the same modules, or of this one before
    weights = [linear.weight if isinstance(linear, QuantisedLinear) else linear.weight.detach() for linear in linears]
    whole, *others = weights
    for weight in others:
        joined = whole.joined(weight) if isinstance(whole, StoredWeight) and isinstance(weight, StoredWeight) else None
        if joined is None:
            return SeveralWeights(tuple(weights))
        whole = joined
    assert isinstance(whole, StoredWeight)
    begin = 0
    for linear, weight in zip(linears, weights, strict=True):
        assert isinstance(linear, QuantisedLinear)
        linear.store(whole.rows(begin, begin + weight.shape[0]))
        begin += weight.shape[0]
    of_all = (whole,)
    for linear in linears:
        linear.whole = of_all
    return whole


def spread(scales: Tensor, columns: int) -> Tensor:
    """Scales [rows, groups] of every number [rows, columns], or [rows, 1] as they are."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(GROUP, 1)[:, :columns]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def in_eight_bits(x: Tensor, activations: str, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows [T, in] as float8_e4m3fn and their scales, [1, T] or [groups, T] float32."""
    assert (activations == "static") is (input_scale is not None)
    return quantize_fp8(x, group_size=GROUP if activations == "group" else None, scale=input_scale)


def rounded(x: Tensor, activations: str) -> Tensor:
    """Rows [T, in] as a product with rounded activations sees them, in their own dtype."""
    return x if activations == "none" else RoundedRows.of(x, activations).widened()


# --- kernels of torch

# Of rows, their scales [groups, T], a weight's numbers and its scales [out, groups].
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def scaled_by_rows(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    out: Tensor = torch._scaled_mm(
        numbers, weight.t(), scales.flatten()[:, None], weight_scales.flatten()[None], out_dtype=torch.bfloat16
    )
    return out


def scaled_by_groups(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    rows = -(-len(numbers) // 16) * 16 - len(numbers)  # so that each column of scales starts on 16 bytes
    padded = functional.pad(numbers.view(torch.uint8), (0, 0, 0, rows)).view(FP8)
    scales_of_rows = functional.pad(scales, (0, rows), value=1.0).t()
    kind = functional.ScalingType.BlockWise1x128
    out: Tensor = functional.scaled_mm(
        padded, weight.t(), scales_of_rows, kind, by_columns(weight_scales), kind, output_dtype=torch.bfloat16
    )
    return out[: len(numbers)]


def by_columns(scales: Tensor) -> Tensor:
    """The same numbers, those of a column one behind another, as products by groups want them."""
    return scales.t().contiguous().t()


@cache
def trusted(kernel: Kernel, device: int) -> Kernel | None:
    """The kernel, if this GPU and this torch have it and it gives what the definition gives."""
    return kernel if gives_the_definition(kernel, torch.device("cuda", device)) else None


def gives_the_definition(kernel: Kernel, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    outs, ins, by_groups = 272, 640, kernel is scaled_by_groups
    numbers = (torch.randn(outs, ins, generator=generator) * 20).to(device, FP8)
    scales = torch.rand(outs, ins // GROUP if by_groups else 1, generator=generator).to(device) + 0.5
    activations = "group" if by_groups else "token"
    weight = numbers.double() * spread(scales, ins)  # no Fp8Weight, which asks for this kernel when it is made
    for rows in (1, 5, 64):
        x, of_x = in_eight_bits(torch.randn(rows, ins, generator=generator).to(device), activations)
        want = (x.double() * spread(of_x.t(), ins)) @ weight.t()
        try:
            got = kernel(x, of_x, numbers, scales)
        except (RuntimeError, AttributeError, ValueError, TypeError):  # which is how torch says that it has none here
            return False
        if not bool(((got.double() - want).norm() <= KERNEL_ERROR * want.norm()).item()):
            return False
    return True


# --- modules


class QuantisedLinear(nn.Module):
    """What stands in a module of transformers where `nn.Linear` stood, and serves both our parts and its own forward
    pass. Its numbers and scales are buffers: nobody casts them."""

    kinds: ClassVar[tuple[type[Any], ...]] = (Fp8Weight, Int4Weight)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._kind: type[Any] | None = None
        self._options: dict[str, Any] = {}
        self.whole: tuple[StoredWeight] | None = None  # of which the weight is a part, with others

    def store(self, weight: StoredWeight) -> None:
        """Takes a weight, in place of the one it had."""
        assert isinstance(weight, self.kinds)
        self._kind, self._options, self.whole = type(weight), {}, None
        for field in fields(weight):
            value = getattr(weight, field.name)
            if isinstance(value, Tensor):
                self.register_buffer(field.name, value, persistent=False)
            else:
                self._options[field.name] = value

    @property
    def weight(self) -> StoredWeight:
        assert self._kind is not None
        stored: StoredWeight = self._kind(**self._options, **dict(self.named_buffers(recurse=False)))
        return stored

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias)
