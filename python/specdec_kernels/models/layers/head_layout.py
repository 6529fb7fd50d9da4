"""The order of elements within heads that our kernels need, and linears permuted into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...plans import HEAD_DIMS
from .linear import Linear, Projection, concatenated, fused, linear_of, permuted
from .norm import RMSNorm
from .quantized import QuantizedLinear
from .rope import Rope


class PermutedProjection(Projection):
    """A projection whose output i is output order[i] of another, or 0 where that is -1.

    For projections whose weights cannot be permuted. `order` is on their device.
    """

    def __init__(self, projection: Projection, order: Tensor) -> None:
        self._projection, self._index, self._is_zero = projection, order.clamp(min=0), order < 0

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._projection(x)[..., self._index].masked_fill(self._is_zero, 0)


def reordered(linear: Any, order: list[int], device: torch.device) -> Projection:
    """Return the projection whose output i is a module's output order[i], or 0 where that is -1.

    Its weights are a copy, unless they are quantized.
    """
    whole = linear_of(linear)
    if isinstance(whole.weight, Tensor):
        return whole.permute_outputs(order)
    return PermutedProjection(whole, torch.tensor(order, device=device))


class HeadLayout:
    """The places of the elements of a model's heads in our linears and pools, so that kernels compute what it does.

    `rope_qkv_write_kv` rotates element i of a head with element i + D / 2, all of them, and kernels know D of 64, 128
    and 256. Other models have the same elements in another order: rows of the projections are permuted so that each
    rotated pair stands where the kernel expects it, with cosine 1 and sine 0 for elements that are not rotated, and
    zeros pad a head to D. Scores do not change, since queries and keys are permuted alike, and the scale stays that of
    the model's heads.

    Where nothing is permuted, linears share the modules' weights. Otherwise they are copies: the layer's query, key and
    value projections, and with padding the output projection too, D / dim times their size.
    """

    def __init__(self, dim: int, rope: Rope) -> None:
        self.dim, self.size, self.rope = dim, pool_dim(dim), rope
        positions, pairs = rope.cos.shape
        half = self.size // 2
        self.rotations = rope.cos.new_zeros(positions, self.size)
        self.rotations[:, :half] = 1
        self.rotations[:, :pairs] = rope.cos
        self.rotations[:, half : half + pairs] = rope.sin
        first, step = (pairs, 1) if not rope.interleaved else (1, 2)
        # The element of a model's query or key head at each index of ours; -1: none, which is 0.
        self._order = [-1] * self.size
        self._order[:pairs] = range(0, step * pairs, step)
        self._order[half : half + pairs] = range(first, first + step * pairs, step)
        others = iter(range(2 * pairs, dim))
        self._order = [next(others, -1) if i % half >= pairs else element for i, element in enumerate(self._order)]
        self._padded = [i if i < dim else -1 for i in range(self.size)]  # value heads

    @property
    def _is_permuted(self) -> bool:
        return self._order != list(range(self.size))

    def qkv(
        self,
        kv_heads: int,
        *linears: Any,
        order: Sequence[int] | None = None,
        gates: Sequence[int] = (),
        normed: Callable[[Projection], Projection] | None = None,
    ) -> Projection:
        """Return the fused projection of queries, keys and values, and of gates after them.

        Args:
            kv_heads: of keys, and of values.
            linears: one module each, or one for all.
            order: which head of the modules' output each of ours is; None: all of them, in our order.
            gates: which of these heads are gates of attention's output, not among `order`.
            normed: wraps a projection whose heads have the model's layout, e.g. with norms.
        """
        heads = sum(linear.out_features for linear in linears) // self.dim if order is None else len(order)
        orders = [self._order] * (heads - kv_heads) + [self._padded] * (kv_heads + len(gates))
        elements = self._elements(orders, [*(range(heads) if order is None else order), *gates])
        quantized = any(isinstance(linear, QuantizedLinear) for linear in linears)
        is_permuted = elements != list(range(sum(linear.out_features for linear in linears)))
        if is_permuted and normed is None and not quantized:
            return concatenated(*linears).permute_outputs(elements)
        whole: Projection = fused(*linears)
        whole = whole if normed is None else normed(whole)
        if not is_permuted:
            return whole
        return PermutedProjection(whole, torch.tensor(elements, device=self.rotations.device))

    def out(self, linear: Any) -> Linear:
        """Return the output projection of attention."""
        whole, elements = self._padded_linear(linear, linear.in_features)
        return whole if elements is None else whole.permute_inputs(elements)

    def gate(self, linear: Any) -> Projection:
        """Return the projection of the gates of attention's output."""
        whole, elements = self._padded_linear(linear, linear.out_features)
        return whole if elements is None else whole.permute_outputs(elements)

    def _padded_linear(self, linear: Any, features: int) -> tuple[Linear, list[int] | None]:
        """Return a module's linear, and the order that pads these features of value heads; None: no padding."""
        whole = linear_of(linear)
        if self.size == self.dim:
            return whole, None
        if not isinstance(whole.weight, Tensor):
            raise ValueError(
                f"model: head_dim is {self.dim} next to quantized projections, expected one of {HEAD_DIMS} there"
            )
        return whole, self._elements([self._padded] * (features // self.dim))

    def norm(self, norm: RMSNorm) -> RMSNorm:
        """Return the RMSNorm of each query or key head, or of all of them together, in our layout.

        Zeros count among the elements whose mean square is taken, which weight and eps make up for.
        """
        if not self._is_permuted:
            return norm
        part = self.dim / self.size
        elements = self._elements([self._order] * (len(norm.weight) // self.dim))
        weight = permuted(norm.weight.float() * part**0.5, elements).to(norm.weight.dtype)
        return norm._replace(weight=weight, eps=norm.eps * part)

    def permute(self, values: Tensor) -> Tensor:
        """Return [size] values for the elements of a query or key head from the model's [dim]; 0 for padding."""
        return permuted(values, self._order)

    def _elements(self, orders: list[list[int]], sources: Sequence[int] | None = None) -> list[int]:
        """Return the model's element at each of our indices, over heads of these orders next to each other.

        `sources` says which of the model's heads each of ours is; None: they are in order.
        """
        heads = zip(range(len(orders)) if sources is None else sources, orders, strict=True)
        return [-1 if at < 0 else head * self.dim + at for head, order in heads for at in order]


def grouped_qkv_order(heads: int, kv_heads: int) -> list[int]:
    """Return the order of heads for a projection that stores, for each KV head, its queries, its key and its value."""
    group = heads // kv_heads
    begins = range(0, heads + 2 * kv_heads, group + 2)
    queries = [begin + i for begin in begins for i in range(group)]
    return queries + [begin + group + part for part in range(2) for begin in begins]


def pool_dim(head_dim: int) -> int:
    """Return the smallest head dimension of our kernels that holds a model's; its own if none does."""
    return next((size for size in HEAD_DIMS if size >= head_dim), head_dim)
