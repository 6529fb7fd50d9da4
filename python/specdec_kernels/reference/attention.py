"""Reference of tree_attention: one query row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BAD_PAGE, BAD_LENGTH = 4, 8


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
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` and `lse` in float64 and the status bits of every slot."""
    pages, page_size, kv_heads, head_dim = k_pool.shape
    num_slots, max_pages = page_table.shape
    group = q.shape[-2] // kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    status = torch.zeros(num_slots, dtype=torch.int32)

    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < num_slots:
            continue
        # Views of this request's rows, whichever way they are laid out.
        if cu_seqlens_q is None:
            where: int | slice = b
            length = q.shape[1]
            valid = length if q_lens is None else int(q_lens[b])
        else:
            where = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            length = valid = where.stop - where.start
        if not 0 <= valid <= length:
            status[slot] |= BAD_LENGTH
            valid = min(max(valid, 0), length)
        if valid == 0:
            continue
        tail = valid if tail_len is None else tail_len
        offset = 0 if tail_len is None else tail_len - length
        used_tail = tail if mask is not None else min(max(valid + offset, 0), tail)

        capacity = max_pages * page_size
        prefix = min(max(int(prefix_lens[slot]), 0), capacity)
        end = min(prefix + used_tail, capacity)
        if prefix != prefix_lens[slot] or end != prefix + used_tail:
            status[slot] |= BAD_LENGTH

        # The request's KV as contiguous rows; rows on a bad page are not there.
        k = torch.zeros(end, kv_heads, head_dim, dtype=torch.float64)
        v = torch.zeros_like(k)
        there = torch.zeros(end, dtype=torch.bool)
        for row in range(end):
            page = int(page_table[slot, row // page_size])
            if 0 <= page < pages:
                k[row] = k_pool[page, row % page_size].double()
                v[row] = v_pool[page, row % page_size].double()
                there[row] = True
            else:
                status[slot] |= BAD_PAGE

        for i in range(valid):
            visible = there.clone()
            for j in range(end - prefix):
                by_mask = mask is not None and bool(int(mask[where][i, j // 64]) >> (j % 64) & 1)
                visible[prefix + j] &= by_mask if mask is not None else j <= i + offset
            if not visible.any():
                continue
            keys, values = k[visible].repeat_interleave(group, 1), v[visible].repeat_interleave(group, 1)
            scores = torch.einsum("hd,jhd->hj", q[where][i].double(), keys) * scale
            out[where][i] = torch.einsum("hj,jhd->hd", scores.softmax(-1), values)
            lse[where][i] = scores.logsumexp(-1)
    return out, lse, status
