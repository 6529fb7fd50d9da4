"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over paged latent rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ops import rope_heads
from ..kv_pools import LatentLayout, LayerKv
from .linear import Linear
from .norm import RMSNorm
from .paged_batch import PagedBatch


@dataclass
class LatentAttention:
    """Attention to latent rows in the absorbed form: no key and no value of a head is ever computed.

    The key of a head is `key_up` of the latent part of a row, next to the row's rotated part, and its value is
    `value_up` of the latent part. So queries are multiplied by `key_up`, scores are products with whole rows, and sums
    of latent parts are multiplied by `value_up`.

    `attach_caches` sets `cache` once the model has its pools.
    """

    qkv: Linear  # [queries + latent + rope, in]; queries: those of all heads, or what `q_up` makes them of
    out: Linear
    key_up: Tensor  # [heads, nope, latent]
    value_up: Tensor  # [heads, latent, v]
    kv_norm: RMSNorm  # of the latent part
    rotations: Tensor | None  # [num_positions, rope] float32, cosines and then sines; None: nothing is rotated
    interleaved: bool  # rotated pairs are neighbors
    layout: LatentLayout
    scale: float
    q_norm: Tensor | None = None  # [queries], with the eps of `kv_norm`
    q_up: Linear | None = None  # [heads * (nope + rope), queries]
    cache: LayerKv = field(init=False)

    @property
    def cache_spec(self) -> LatentLayout:
        return self.layout

    def write_cache(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Write the latent rows of normalized x [T, in] at positions [B, Q] or [M].

        Returns:
            Queries, or what `q_up` makes them of, normalized [T, queries].
        """
        projected = self.qkv(x)
        width = self.layout.latent_dim + self.layout.rope_dim
        queries, rows = torch.split(projected, [projected.shape[-1] - width, width], dim=-1)
        normed = batch.write_latent(
            rows,
            self.kv_norm,
            self.rotations,
            positions,
            self.cache,
            interleaved=self.interleaved,
            q=None if self.q_norm is None else queries,
            q_norm=self.q_norm,
        )
        return queries if normed is None else normed

    def __call__(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return the attention output [T, heads * v] for x [T, in], before the projection `out`."""
        queries = self.absorb(self.write_cache(x, positions, batch), positions)
        mixed = batch.attend(
            queries.view(*positions.shape, *queries.shape[1:]),
            self.cache,
            scale=self.scale,
            window=self.layout.window,
            soft_cap=None,
            sinks=None,
        ).view(*queries.shape[:2], -1)
        values = mixed.new_empty(*queries.shape[:2], self.value_up.shape[2])
        torch.bmm(mixed.transpose(0, 1), self.value_up, out=values.transpose(0, 1))
        return values.flatten(1)

    def absorb(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return queries of latent rows [T, heads, latent + rope], from what `write_cache` returns."""
        if self.q_up is not None:
            queries = self.q_up(queries)
        (heads, nope, latent), rope = self.key_up.shape, self.layout.rope_dim
        plain, rotated = torch.split(queries.view(len(queries), heads, -1), [nope, rope], dim=-1)
        absorbed = queries.new_empty(len(queries), heads, latent + rope)
        torch.bmm(plain.transpose(0, 1), self.key_up, out=absorbed[..., :latent].transpose(0, 1))
        part = absorbed[..., latent:]
        if self.rotations is None:
            part.copy_(rotated)
        else:
            rope_heads(rotated, self.rotations, positions.flatten(), interleaved=self.interleaved, out=part)
        return absorbed
