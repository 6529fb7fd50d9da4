"""The attention part of a layer over paged KV."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ..kv_pools import KeyValueLayout, LayerKv
from .linear import Linear, Projection
from .norm import LayerNorm, RMSNorm
from .paged_batch import PagedBatch


@dataclass
class Attention:
    """Attention over paged KV: QKV projection, head norms, RoPE and KV write, attention, output projection.

    `attach_caches` sets `cache` once the model has its pools.
    """

    qkv: Projection  # a Linear, mostly; [(heads + 2 * kv_heads + num_gates) * head_dim, in]
    out: Linear
    rotations: Tensor  # [num_positions, head_dim] float32, from `HeadLayout`
    kv_heads: int
    head_dim: int  # of the kernels, `HeadLayout.size`
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    window: int | None = None
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [heads], an extra score for each head, without a value
    # Multiplies rotated queries, in their dtype: [num_positions, head_dim], either of them may be 1.
    q_factors: Tensor | None = None
    # [heads * head_dim, in], or [heads, in] for one gate a head; the sigmoid of its output multiplies attention's.
    gate: Projection | None = None
    num_gates: int = 0  # heads of such gates that follow in qkv's output, one for each query head; instead of `gate`
    cache: LayerKv = field(init=False)

    @property
    def cache_spec(self) -> KeyValueLayout:
        return KeyValueLayout(self.kv_heads, self.head_dim, self.head_dim, self.window)

    def write_cache(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Write the KV of normalized x [T, in] at positions [B, Q] or [M].

        Returns:
            The queries [*positions, heads, head_dim].
        """
        return self._project(x, positions, batch)[0]

    def _project(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """Write the KV, and return the queries and the gates [*positions, num_gates, head_dim] that follow qkv."""
        heads = self.qkv(x).view(*positions.shape, -1, self.head_dim)
        qkv, gates = heads.split([heads.shape[-2] - self.num_gates, self.num_gates], -2)
        q = batch.rope_and_write(qkv, self.rotations, positions, self.cache, q_norm=self.q_norm, k_norm=self.k_norm)
        if self.q_factors is not None:
            q *= self.q_factors[positions.clamp(0, len(self.q_factors) - 1)][..., None, :]
        return q, gates

    def __call__(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return the attention output [T, heads * head_dim] for x [T, in], before the projection `out`."""
        q, gates = self._project(x, positions, batch)
        out = batch.attend(
            q, self.cache, scale=self.scale, window=self.window, soft_cap=self.soft_cap, sinks=self.sinks
        )
        if self.num_gates:
            out = out * gates.sigmoid()
        out = out.flatten(-2).flatten(0, -2)
        if self.gate is None:
            return out
        gates = self.gate(x).sigmoid()
        return (out.view(*gates.shape, -1) * gates[..., None]).view(out.shape)


@dataclass(frozen=True)
class LayerNormedHeads(Projection):
    """A projection of queries, keys and values with LayerNorms of query and key heads, by torch."""

    projection: Projection
    weight: Tensor  # [heads + kv_heads, dim] float32
    bias: Tensor | None
    eps: float

    @classmethod
    def of(
        cls, projection: Projection, heads: int, kv_heads: int, q_norm: LayerNorm, k_norm: LayerNorm
    ) -> LayerNormedHeads:
        """Return the projection with norms whose weights are [dim], for all heads alike, or [heads, dim]."""

        def stacked(q: Tensor | None, k: Tensor | None) -> Tensor | None:
            if q is None or k is None:
                return None
            return torch.cat([part.expand(n, q.shape[-1]) for part, n in ((q, heads), (k, kv_heads))]).float()

        weight = stacked(q_norm.weight, k_norm.weight)
        assert weight is not None
        return cls(projection, weight, stacked(q_norm.bias, k_norm.bias), q_norm.eps)

    def __call__(self, x: Tensor, /) -> Tensor:
        count, dim = self.weight.shape
        rows = self.projection(x)
        rows = rows.view(*rows.shape[:-1], -1, dim)
        normed = functional.layer_norm(rows[..., :count, :].float(), (dim,), eps=self.eps) * self.weight
        normed = normed if self.bias is None else normed + self.bias
        return torch.cat([normed.to(rows.dtype), rows[..., count:, :]], -2).flatten(-2)
