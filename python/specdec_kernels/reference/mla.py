"""References of latent attention: tree_attention whose values are the beginning of its keys, and rows for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..status import Status
from .attention import tree_attention
from .kv import write_kv


def latent_rows(kv_pool: Tensor, kv_scale: float = 1.0) -> Tensor:
    """Return the latent rows of a pool in float64: of uint8 [.., 656] the published format, else its elements."""
    if kv_pool.dtype != torch.uint8:
        return kv_pool.double() * kv_scale
    latent = kv_pool[..., :512].contiguous().view(torch.float8_e4m3fn).double()
    factors = kv_pool[..., 512:528].contiguous().view(torch.float32).double()
    rope = kv_pool[..., 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent * factors.repeat_interleave(128, -1), rope], -1)


def mla_tree_attention(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    latent_dim: int = 512,
    slots: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    tail_len: int | None = None,
    mask: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float,
    window: int | None = None,
    kv_scale: float = 1.0,
    max_kv_len: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `out` and `lse` in float64 and the status bits of every slot."""
    rows = latent_rows(kv_pool, kv_scale)
    keys = rows.unsqueeze(2)
    if indices is None:
        return tree_attention(
            q, keys, keys[..., :latent_dim], page_table, prefix_lens, slots=slots, q_lens=q_lens,
            cu_seqlens_q=cu_seqlens_q, tail_len=tail_len, mask=mask, scale=scale, window=window, max_kv_len=max_kv_len,
        )  # fmt: skip
    return _listed(
        q, rows, page_table, prefix_lens, indices, latent_dim, scale, max_kv_len, slots, q_lens, cu_seqlens_q, tail_len
    )


def _listed(
    q: Tensor,
    rows: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    indices: Tensor,
    latent_dim: int,
    scale: float,
    max_kv_len: int | None,
    slots: Tensor | None,
    q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_len: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from each query row to the rows of its list."""
    pages, page_size, _ = rows.shape
    num_slots, max_pages = page_table.shape
    capacity = min(max_pages * page_size, max_kv_len or 2**31)
    out = torch.zeros(*q.shape[:-1], latent_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    status = torch.zeros(num_slots, dtype=torch.int32)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < num_slots:
            continue
        where = b if cu_seqlens_q is None else slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        valid = q[where].shape[0] if q_lens is None else int(q_lens[b])
        end = min(int(prefix_lens[slot]) + (valid if tail_len is None else tail_len), capacity)
        for i in range(valid):
            listed = indices[where][i].long()
            if ((listed < -1) | (listed >= end)).any():
                status[slot] |= int(Status.BAD_LENGTH)
            listed = listed[(listed >= 0) & (listed < end)]
            page = page_table[slot, listed // page_size].long()
            on_page = (page >= 0) & (page < pages)
            if not on_page.all():
                status[slot] |= int(Status.BAD_PAGE)
            seen = rows[page[on_page], listed[on_page] % page_size]
            if len(seen) == 0:
                continue
            scores = q[where][i].double() @ seen.T * scale
            out[where][i] = scores.softmax(-1) @ seen[:, :latent_dim]
            lse[where][i] = scores.logsumexp(-1)
    return out, lse, status


def rope_heads(x: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate in float64."""
    cos, sin = cos_sin.double()[positions.long().clamp(0, len(cos_sin) - 1)].chunk(2, -1)
    cos, sin = (part.view(*positions.shape, *[1] * (x.dim() - positions.dim() - 1), -1) for part in (cos, sin))
    wide = x.double()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def write_latent(
    x: Tensor,
    norm: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    eps: float = 1e-6,
    cos_sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    kv_scale: float = 1.0,
    q: Tensor | None = None,
    q_norm: Tensor | None = None,
    q_out: Tensor | None = None,
    **where: Any,
) -> None:
    """Compute rows in float64, and write them by `write_kv`, both halves as a key and a value."""

    def normalized(rows: Tensor, weight: Tensor) -> Tensor:
        wide = rows.double()
        return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()

    latent, rope = x[..., : len(norm)], x[..., len(norm) :]
    if cos_sin is not None:
        assert positions is not None
        rope = rope_heads(rope, cos_sin, positions, interleaved=interleaved)
    rows = torch.cat([normalized(latent, norm), rope.double()], -1)
    if kv_pool.dtype != x.dtype:
        rows = (rows / kv_scale).clamp(-448, 448)
    rows = rows.float().to(kv_pool.dtype)
    (k, v), (k_pool, v_pool) = (whole.unsqueeze(-2).chunk(2, -1) for whole in (rows, kv_pool))
    write_kv(k, v, k_pool, v_pool, page_table, prefix_lens, **where)
    if q is not None and q_norm is not None and q_out is not None:
        q_out.copy_(normalized(q, q_norm))
