"""The attention part of a layer over paged KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...ops import rope_qkv_write_kv, tree_attention, write_kv
from ...plans import HEAD_DIMS
from ..kv_pools import KvShape, LayerKv
from .linear import LayerNorm, Norm, Product, joined, merged, moved, product_of
from .quantized import QuantisedLinear

# Beyond the longest sequence: the deepest node of a tree, and padding.
SPARE_POSITIONS = 320


class Rows(NamedTuple):
    """Which KV rows a forward pass writes and sees; the letters are those of `tree_attention`.

    Row j of request b is written at KV row `prefix_lens[slot] + row_offset + j` if j < num_valid[b]. It sees the
    prefix and, of the `tail_len` rows behind it, those its mask names (no mask: a causal chain).

    Requests have Q rows each, and positions are [B, Q]; or, with `cu_seqlens_q`, rows are packed, positions and mask
    are [M] and [M, W], and a request's tail is its own rows.
    """

    slots: Tensor  # [B] int32
    page_table: Tensor  # [num_slots, max_pages] int32, of layers whose window has none of its own
    prefix_lens: Tensor  # [num_slots] int32
    tail_len: int | None = None  # None: packed rows
    row_offset: int = 0
    mask: Tensor | None = None  # [B, Q, W] or [M, W] int64
    num_valid: Tensor | None = None  # [B] int32
    cu_seqlens_q: Tensor | None = None  # [B + 1] int32: where each request's packed rows begin, and the last one's end
    status: Tensor | None = None  # [num_slots] int32
    fixed_split: int | None = None
    max_kv_len: int | None = None  # prefix and tail of no request have more; None: what the page table has room for
    window_tables: Mapping[int, Tensor] = MappingProxyType({})  # [num_slots, max_pages] of layers with these windows

    def table_of(self, kv: LayerKv) -> Tensor:
        """The page table of a layer."""
        return self.page_table if kv.window is None else self.window_tables[kv.window]

    def write(self, k: Tensor, v: Tensor, kv: LayerKv) -> None:
        """Keys and values [B, Q, kv_heads, head_dim] or [M, kv_heads, head_dim] to a layer's pools."""
        write_kv(k, v, **self._written_in(kv))

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotations: Tensor,
        positions: Tensor,
        kv: LayerKv,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """Of qkv [B, Q, heads + 2 * kv_heads, head_dim] or [M, ...] queries and keys normalised and rotated, by
        rotations [num_positions, head_dim] float32 at positions [B, Q] or [M]; keys and values go to a layer's pools.
        Queries [B, Q, heads, head_dim] or [M, heads, head_dim] are returned."""
        queries: Tensor = rope_qkv_write_kv(
            qkv,
            rotations,
            positions,
            **self._written_in(kv),
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=1e-6 if q_norm is None else q_norm.eps,
        )
        return queries

    def _written_in(self, kv: LayerKv) -> dict[str, Any]:
        """What the ops that write KV are told of the pass and a layer."""
        return {
            "k_pool": kv.k,
            "v_pool": kv.v,
            "page_table": self.table_of(kv),
            "prefix_lens": self.prefix_lens,
            "row_offset": self.row_offset,
            "slots": self.slots,
            "num_valid": self.num_valid,
            "cu_seqlens_q": self.cu_seqlens_q,
            "k_scale": kv.scales.k,
            "v_scale": kv.scales.v,
            "status": self.status,
        }

    def attend(
        self,
        q: Tensor,
        kv: LayerKv,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """What queries [B, Q, heads, head_dim] or [M, heads, head_dim] attend to in a layer's KV, of q's shape; with
        sinks [heads] float32, one more score of each head that adds to the softmax's sum and to nothing else."""
        lse = None if sinks is None else q.new_empty(q.shape[:-1], dtype=torch.float32)
        out: Tensor = tree_attention(
            q,
            kv.k,
            kv.v,
            self.table_of(kv),
            self.prefix_lens,
            slots=self.slots,
            q_lens=self.num_valid,
            cu_seqlens_q=self.cu_seqlens_q,
            tail_len=self.tail_len,
            mask=self.mask,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            k_scale=kv.scales.k,
            v_scale=kv.scales.v,
            fixed_split=self.fixed_split,
            max_kv_len=self.max_kv_len,
            lse=lse,
            status=self.status,
        )
        if lse is not None and sinks is not None:
            # exp(lse) becomes exp(lse) + exp(sink).
            out = (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
        return out


class LastRows(NamedTuple):
    """Rows of a pass whose own states are wanted, each in turn a request of one row."""

    places: Tensor  # [R] int32: which they are of the pass's T rows
    positions: Tensor  # [R, 1] int32
    rows: Rows


class Projection(Protocol):
    """What makes queries, keys and values."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., (heads + 2 * kv_heads) * head_dim] from [..., in]."""


@dataclass
class Attention:
    """Queries, keys and values by one product, normalised where the model does so, rotated, written to the layer's
    pools, attended, and multiplied once more.

    `kv` is set by the model that the layer is part of, once it has its pools.
    """

    qkv: Projection  # a Product, mostly; [(heads + 2 * kv_heads) * head_dim, in]
    out: Product
    rotations: Tensor  # [num_positions, head_dim] float32, of `Heads`
    kv_heads: int
    head_dim: int  # as `Heads` has it
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [heads], a score of each head beside those of its rows, which brings no value
    # What rotated queries are multiplied by, in their dtype: [num_positions, head_dim], or 1 for either.
    q_factors: Tensor | None = None
    gate: Product | None = None  # [heads * head_dim, in], of which the sigmoids multiply what heads attend to
    kv: LayerKv = field(init=False)

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(self.kv_heads, self.head_dim, self.head_dim, self.window)

    def write_kv(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """The KV of x [T, in], normalised, at positions [B, Q] or [M]; its queries [*positions, heads, head_dim] are
        returned."""
        qkv = self.qkv(x).view(*positions.shape, -1, self.head_dim)
        q = rows.rotate_and_write(qkv, self.rotations, positions, self.kv, q_norm=self.q_norm, k_norm=self.k_norm)
        if self.q_factors is not None:
            q *= self.q_factors[positions.clamp(0, len(self.q_factors) - 1)][..., None, :]
        return q

    def __call__(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """What x [T, in] attends to [T, heads * head_dim], before the product `out`."""
        q = self.write_kv(x, positions, rows)
        out = rows.attend(q, self.kv, scale=self.scale, window=self.window, soft_cap=self.soft_cap, sinks=self.sinks)
        out = out.flatten(-2).flatten(0, -2)
        return out if self.gate is None else out * self.gate(x).sigmoid()


@dataclass(frozen=True)
class NormedHeads(Projection):
    """Queries, keys and values of which the heads of the first two pass layer norms, by torch."""

    product: Projection
    weight: Tensor  # [heads + kv_heads, dim] float32
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, product: Projection, heads: int, kv_heads: int, q_norm: LayerNorm, k_norm: LayerNorm) -> NormedHeads:
        """By norms whose weights are [dim], of all heads alike, or [heads, dim]."""

        def side_by_side(q: Tensor | None, k: Tensor | None) -> Tensor | None:
            if q is None or k is None:
                return None
            return torch.cat([part.expand(n, q.shape[-1]) for part, n in ((q, heads), (k, kv_heads))]).float()

        weight = side_by_side(q_norm.weight, k_norm.weight)
        assert weight is not None
        return cls(product, weight, side_by_side(q_norm.bias, k_norm.bias), q_norm.eps)

    def __call__(self, x: Tensor, /) -> Tensor:
        count, dim = self.weight.shape
        rows = self.product(x)
        rows = rows.view(*rows.shape[:-1], -1, dim)
        normed = functional.layer_norm(rows[..., :count, :].float(), (dim,), eps=self.eps) * self.weight
        normed = normed if self.bias is None else normed + self.bias
        return torch.cat([normed.to(rows.dtype), rows[..., count:, :]], -2).flatten(-2)


class Reordered(Projection):
    """A product of which output i is that of places[i], or 0 where that is -1: of one whose rows cannot be moved. The
    places are on its device."""

    def __init__(self, product: Projection, places: Tensor) -> None:
        self._product, self._index, self._is_zero = product, places.clamp(min=0), places < 0

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._product(x)[..., self._index].masked_fill(self._is_zero, 0)


class Rotation(NamedTuple):
    """Angles by which pairs of numbers of a head are rotated at each position, as a model has them."""

    cosines: Tensor  # [num_positions, pairs] float32
    sines: Tensor
    interleaved: bool = False  # pairs are numbers 2i and 2i + 1 of a head, not i and i + pairs

    @classmethod
    def of(cls, rotary: Any, max_len: int, device: torch.device, *kind: str, interleaved: bool = False) -> Rotation:
        """Those of a module of transformers that makes cosines and sines, for sequences of up to `max_len` tokens.

        Beyond `constant_len` the table ends, and `rope_qkv_write_kv` takes its last row.
        """
        count = min(max_len + SPARE_POSITIONS, constant_len(rotary.config) or max_len + SPARE_POSITIONS)
        positions = torch.arange(count, device=device)[None]
        if "mrope_section" in (getattr(rotary.config, "rope_parameters", None) or {}):
            positions = positions.expand(3, 1, -1)  # of each axis, alike for text
        tables = rotary.to(device)(torch.empty(0, dtype=torch.float32, device=device), positions, *kind)
        tables = tuple(
            table.flatten(0, -3) for table in tables
        )  # some give them for each of three axes, alike for text
        # Most modules give each angle twice: those of a pair stand side by side, or half a table apart.
        pairs = len(rotary.inv_freq) if hasattr(rotary, "inv_freq") else tables[0].shape[-1] // 2
        twice = interleaved and torch.equal(tables[0][..., 0::2], tables[0][..., 1::2])
        cosines, sines = (table[0, :, 0::2] if twice else table[0, :, :pairs] for table in tables)
        return cls(cosines, sines, interleaved)

    @classmethod
    def none(cls, device: torch.device) -> Rotation:
        """That of a layer which does not rotate."""
        return cls(torch.empty(1, 0, device=device), torch.empty(1, 0, device=device))


def constant_len(config: Any) -> int | None:
    """The longest sequence in which the angle of a position does not depend on the sequence's length; None: any.

    Up to there longrope is its short factors (Ding et al. 2024, arXiv 2402.13753), and dynamic NTK the plain rotation.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    ends = []
    for each in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        if each.get("rope_type") == "longrope":
            ends.append(each.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        if each.get("rope_type") == "dynamic":
            ends.append(config.max_position_embeddings)
    return min(ends, default=None)


class Heads:
    """How the heads of a model stand in our products and pools, so that the kernels compute what the model does.

    `rope_qkv_write_kv` rotates number i of a head with number i + D / 2, all of them, and kernels know D of 64, 128
    and 256.
    Other models are the same numbers in other places: rows of the products are moved so that each rotated pair stands
    where the kernel looks for it, with cosine 1 and sine 0 for numbers that are not rotated, and zeros fill a head up
    to D. Scores do not change, since queries and keys are moved alike, and the scale stays that of the model's heads.

    Where nothing moves, products share the modules' weights. Else they are copies: of the layer's projections of
    queries, keys and values, and with zeros of the one behind attention too, D / dim of their size.
    """

    def __init__(self, dim: int, rotation: Rotation) -> None:
        self.dim, self.size = dim, pool_dim(dim)
        positions, pairs = rotation.cosines.shape
        half = self.size // 2
        self.rotations = rotation.cosines.new_zeros(positions, self.size)
        self.rotations[:, :half] = 1
        self.rotations[:, :pairs] = rotation.cosines
        self.rotations[:, half : half + pairs] = rotation.sines
        first, step = (pairs, 1) if not rotation.interleaved else (1, 2)
        # Which number of a model's query or key head stands at each place; -1: none does, it is 0.
        self._order = [-1] * self.size
        self._order[:pairs] = range(0, step * pairs, step)
        self._order[half : half + pairs] = range(first, first + step * pairs, step)
        others = iter(range(2 * pairs, dim))
        self._order = [next(others, -1) if i % half >= pairs else number for i, number in enumerate(self._order)]
        self._as_they_are = [i if i < dim else -1 for i in range(self.size)]  # value heads

    @property
    def _are_moved(self) -> bool:
        return self._order != list(range(self.size))

    def qkv(
        self,
        kv_heads: int,
        *linears: Any,
        order: Sequence[int] | None = None,
        normed: Callable[[Projection], Projection] | None = None,
    ) -> Projection:
        """The product of queries, keys and values, from one module for each or one of all, whose heads stand in this
        order or in another: `order` says which of them each of ours is. `normed` makes another of one whose heads stand
        as the model has them."""
        heads = sum(linear.out_features for linear in linears) // self.dim
        orders = [self._order] * (heads - kv_heads) + [self._as_they_are] * kv_heads
        places = self._places(orders, range(heads) if order is None else order)
        quantised = any(isinstance(linear, QuantisedLinear) for linear in linears)
        are_moved = places != list(range(heads * self.dim))
        if are_moved and normed is None and not quantised:
            return joined(*linears).rows(places)
        whole: Projection = merged(*linears)
        whole = whole if normed is None else normed(whole)
        if not are_moved:
            return whole
        return Reordered(whole, torch.tensor(places, device=self.rotations.device))

    def out(self, linear: Any) -> Product:
        """The product behind attention."""
        product, places = self._filled(linear, linear.in_features)
        return product if places is None else product.columns(places)

    def gate(self, linear: Any) -> Product:
        """The product of gates of what heads attend to."""
        product, places = self._filled(linear, linear.out_features)
        return product if places is None else product.rows(places)

    def _filled(self, linear: Any, numbers: int) -> tuple[Product, list[int] | None]:
        """A module's product, and where these numbers of value heads stand; None: where they are."""
        product = product_of(linear)
        if self.size == self.dim:
            return product, None
        if not isinstance(product.weight, Tensor):
            raise ValueError(
                f"model: head_dim is {self.dim} beside quantised projections, expected one of {HEAD_DIMS} there"
            )
        return product, self._places([self._as_they_are] * (numbers // self.dim))

    def norm(self, norm: Norm) -> Norm:
        """A root mean square norm of each query or key head, or of all of them together. Zeros count among the numbers
        whose mean is taken, which the weight and eps make up for."""
        if not self._are_moved:
            return norm
        part = self.dim / self.size
        places = self._places([self._order] * (len(norm.weight) // self.dim))
        weight = moved(norm.weight.float() * part**0.5, places).to(norm.weight.dtype)
        return Norm(weight, norm.eps * part)

    def placed(self, numbers: Tensor) -> Tensor:
        """What belongs to the numbers [dim] of each query and key head, where these stand [size]; 0 where none does."""
        return moved(numbers, self._order)

    def _places(self, orders: list[list[int]], sources: Sequence[int] | None = None) -> list[int]:
        """Those of heads side by side, as the model has them or each of another of its heads: which number of the model
        stands at each."""
        heads = zip(range(len(orders)) if sources is None else sources, orders, strict=True)
        return [-1 if at < 0 else head * self.dim + at for head, order in heads for at in order]


def order_of_groups(heads: int, kv_heads: int) -> list[int]:
    """Where queries, then keys, then values stand in a product that has, for each key's head, the queries' that share
    it, it, and its values'."""
    group = heads // kv_heads
    begins = range(0, heads + 2 * kv_heads, group + 2)
    queries = [begin + i for begin in begins for i in range(group)]
    return queries + [begin + group + part for part in range(2) for begin in begins]


def pool_dim(head_dim: int) -> int:
    """The head dimension of the kernels that holds a model's; of one that is refused, its own."""
    return next((size for size in HEAD_DIMS if size >= head_dim), head_dim)
