"""Reference of tree_attention: one query row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..status import Status


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    slots: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    tail_len: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_kv_len: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `out` and `lse` in float64 and the status bits of every slot; values may be narrower than keys."""
    window = 2**31 if window is None else window
    pages, page_size, kv_heads, head_dim = k_pool.shape
    value_dim = v_pool.shape[-1]
    num_slots, max_pages = page_table.shape
    group = q.shape[-2] // kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(*q.shape[:-1], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    status = torch.zeros(num_slots, dtype=torch.int32)

    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < num_slots:
            continue
        # This request's rows, in either layout.
        if cu_seqlens_q is None:
            where: int | slice = b
            length = q.shape[1]
            valid = length if q_lens is None else int(q_lens[b])
        else:
            where = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            length = valid = where.stop - where.start
        if not 0 <= valid <= length:
            status[slot] |= int(Status.BAD_LENGTH)
            valid = min(max(valid, 0), length)
        if valid == 0:
            continue
        tail = valid if tail_len is None else tail_len
        offset = 0 if tail_len is None else tail_len - length
        used_tail = tail if mask is not None else min(max(valid + offset, 0), tail)

        capacity = min(max_pages * page_size, max_kv_len or 2**31)
        prefix = min(max(int(prefix_lens[slot]), 0), capacity)
        end = min(prefix + used_tail, capacity)
        if prefix != prefix_lens[slot] or end != prefix + used_tail:
            status[slot] |= int(Status.BAD_LENGTH)

        # KV rows visible to each query row: the prefix, and rows of the tail by mask or causally.
        node = torch.arange(end - prefix)
        if mask is not None:
            of_tail = (mask[where][:valid, node // 64] >> (node % 64) & 1).bool()
        else:
            of_tail = node <= torch.arange(valid)[:, None] + offset
        path = torch.cat([torch.ones(valid, prefix, dtype=torch.bool), of_tail], 1)
        # The window keeps the last `window` rows of each path. Rows before the earliest path's window are not read.
        visible = path & (path.flip(1).cumsum(1).flip(1) <= window)
        shortest = prefix if mask is not None else int(path[0].sum())
        rows = torch.arange(max(shortest - window, 0), end)

        # The request's KV as contiguous rows; rows on a bad page are missing.
        page = page_table[slot, rows // page_size].long()
        valid_page = (page >= 0) & (page < pages)
        if not valid_page.all():
            status[slot] |= int(Status.BAD_PAGE)
        page, rows = page[valid_page], rows[valid_page]
        k = torch.zeros(end, kv_heads, head_dim, dtype=torch.float64)
        v = torch.zeros(end, kv_heads, value_dim, dtype=torch.float64)
        k[rows] = k_pool[page, rows % page_size].double() * k_scale
        v[rows] = v_pool[page, rows % page_size].double() * v_scale
        on_page = torch.zeros(end, dtype=torch.bool)
        on_page[rows] = True

        for i in range(valid):
            seen = visible[i] & on_page
            if not seen.any():
                continue
            heads = q[where][i].double().view(kv_heads, group, head_dim)
            scores = torch.einsum("hgd,jhd->hgj", heads, k[seen]) * scale
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            out[where][i] = torch.einsum("hgj,jhd->hgd", scores.softmax(-1), v[seen]).flatten(0, 1)
            lse[where][i] = scores.logsumexp(-1).flatten()
    return out, lse, status
