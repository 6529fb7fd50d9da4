"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over paged latent rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ops import rope_heads, small_m_bmm, tree_attention
from ..kv_pools import LatentLayout, LayerKv
from .linear import Linear
from .norm import RMSNorm
from .paged_batch import LatentBlock, PagedBatch

HEAD_DIMS = (64, 128, 256)  # of `tree_attention` on a GPU
FLOPS_PER_BYTE = 200  # of memory traffic, on a GPU with tensor cores
MAX_BMM_ROWS, MAX_BMM_IN = 16, 1024  # for `small_m_bmm`; cuBLAS multiplies more rows


@dataclass
class LatentAttention:
    """Attention to latent rows.

    The key of a head is `key_up` of the latent part of a row, next to the row's rotated part, and its value is
    `value_up` of the latent part. In the absorbed form neither is ever computed: queries are multiplied by `key_up`,
    scores are products with whole rows, and sums of latent parts are multiplied by `value_up`. For many query rows it
    is cheaper to expand latent rows to keys and values, which are shorter than these (`PagedBatch.latent_blocks`).

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
        projected = self.write_cache(x, positions, batch)
        if batch.latent_blocks:
            return self.attend_expanded(projected, positions, batch)
        queries = self.absorb(projected, positions)
        mixed = batch.attend(
            queries.view(*positions.shape, *queries.shape[1:]),
            self.cache,
            scale=self.scale,
            window=self.layout.window,
            soft_cap=None,
            sinks=None,
        ).view(*queries.shape[:2], -1)
        values = mixed.new_empty(*queries.shape[:2], self.value_up.shape[2])
        multiply_heads(mixed, self.value_up, values)
        return values.flatten(1)

    def absorb(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return queries of latent rows [T, heads, latent + rope], from what `write_cache` returns."""
        plain, rotated = self.head_queries(queries)
        (heads, _, latent), rope = self.key_up.shape, self.layout.rope_dim
        absorbed = queries.new_empty(len(queries), heads, latent + rope)
        # The weights of the multiplication are read while the rotation runs.
        self.rotate(rotated, positions, absorbed[..., latent:])
        multiply_heads(plain, self.key_up, absorbed[..., :latent])
        return absorbed

    def head_queries(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return both parts of queries, [T, heads, nope] and [T, heads, rope], from what `write_cache` returns."""
        if self.q_up is not None:
            queries = self.q_up(queries)
        heads, nope, _ = self.key_up.shape
        plain, rotated = torch.split(queries.view(len(queries), heads, -1), [nope, self.layout.rope_dim], dim=-1)
        return plain, rotated

    def rotate(self, heads: Tensor, positions: Tensor, out: Tensor) -> None:
        """Write rotated parts [T, heads, rope] of queries to `out`."""
        if self.rotations is None:
            out.copy_(heads)
        else:
            rope_heads(heads, self.rotations, positions.flatten(), interleaved=self.interleaved, out=out)

    @property
    def head_dim(self) -> int | None:
        """The least head_dim of `tree_attention` with room for a head's key and value; None: there is none."""
        most = max(self.key_up.shape[1] + self.layout.rope_dim, self.value_up.shape[2])
        return next((dim for dim in HEAD_DIMS if dim >= most), None)

    def is_cheaper_expanded(self, rows: int, pairs: int, kv_rows: int) -> bool:
        """Return whether expanding `kv_rows` rows costs less than absorbing `rows` queries.

        Both forms are counted in flops of a head: those of `pairs` of a query and a row that it sees, those of `key_up`
        and `value_up`, and the time in which keys and values are written and read.
        """
        dim, (_, nope, latent), v = self.head_dim, self.key_up.shape, self.value_up.shape[2]
        if dim is None or self.layout.window is not None:
            return False
        up = 2 * latent * (nope + v)
        absorbed = pairs * 2 * (2 * latent + self.layout.rope_dim) + rows * up
        expanded = pairs * 4 * dim + kv_rows * (up + FLOPS_PER_BYTE * 8 * dim)
        return expanded < absorbed

    def attend_expanded(self, queries: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return what `__call__` does, from what `write_cache` returns, with expanded keys and values."""
        dim = self.head_dim
        assert dim is not None and self.layout.window is None and batch.mask is None
        plain, rotated = self.head_queries(queries)
        (rows, heads, nope), v_dim = plain.shape, self.value_up.shape[2]
        q = plain.new_zeros(rows, heads, dim)
        q[..., :nope] = plain
        self.rotate(rotated, positions, q[..., nope : nope + rotated.shape[2]])
        q = q.view(*positions.shape, heads, dim)
        most = max(len(block.rows) for block in batch.latent_blocks)
        keys, values = q.new_zeros(2, most, heads, dim).unbind()  # what is beyond a head's key and value stays zero
        out, total = q.new_empty(0), q.new_empty(0)
        for index, block in enumerate(batch.latent_blocks):
            k, v = keys[: len(block.rows)], values[: len(block.rows)]
            self.expand(block, k, v)
            lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
            part = tree_attention(
                q,
                k.view(-1, block.page_size, heads, dim),
                v.view(-1, block.page_size, heads, dim),
                block.page_table,
                block.prefix_lens,
                q_lens=batch.num_valid,
                tail_len=block.tail_len,
                scale=self.scale,
                max_kv_len=block.page_table.shape[1] * block.page_size,
                lse=lse,
                status=batch.status,
            )[..., :v_dim]
            if index == 0:
                out, total = part.float() if len(batch.latent_blocks) > 1 else part, lse
            else:  # rows that see nothing have lse -inf
                out.lerp_(part.float(), torch.sigmoid(lse - total).nan_to_num(0)[..., None])
                total = torch.logaddexp(total, lse)
        return out.to(q.dtype).reshape(rows, heads * v_dim)

    def expand(self, block: LatentBlock, keys: Tensor, values: Tensor) -> None:
        """Write keys and values of a block's rows to the beginnings of heads [R, heads, head_dim]."""
        (heads, nope, latent), v_dim = self.key_up.shape, self.value_up.shape[2]
        pool, (scale,) = self.cache.pools[0].flatten(0, 2), self.cache.scales
        rows = pool[block.rows].to(keys.dtype)
        if scale != 1:
            rows *= scale
        latents = rows[:, :latent].expand(heads, -1, -1)
        torch.bmm(latents, self.key_up.mT, out=keys[..., :nope].transpose(0, 1))
        torch.bmm(latents, self.value_up, out=values[..., :v_dim].transpose(0, 1))
        keys[..., nope : nope + self.layout.rope_dim] = rows[:, None, latent:]


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x [T, heads, in] times weight [heads, in, out] to out [T, heads, out]."""
    inputs, outputs = weight.shape[1:]
    fits = inputs % 32 == 0 and inputs <= MAX_BMM_IN and outputs % 16 == 0
    if x.is_cuda and len(x) <= MAX_BMM_ROWS and fits and x.dtype in (torch.float16, torch.bfloat16):
        small_m_bmm(x, weight, out=out)
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
