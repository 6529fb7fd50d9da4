"""FlashAttention-3 from SGLang's package or its own (written for sglang-kernel 0.4.10 and flash_attn_interface 3.0).

It has no tree masks. Its causal chain reads the bytes that a tree reads: a lower bound, not a baseline. A tree takes
two passes, as in SGLang's `fa3` backend: the prefix for all rows, then each row alone over the tail rows that it
attends to; the two results are merged by their sums of exponentials. For plain decoding SGLang computes the schedule of
tiles once for all layers, which saves each call a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..harness import Baseline
from . import module, that_run
from .paged import PagedTrees, rows_of_nodes


def tree_attention(
    x: PagedTrees, check: Callable[[Tensor], None], check_chain: Callable[[Tensor], None]
) -> Sequence[Baseline]:
    """Return the baselines of tree_attention that run here."""
    device = x.q.device
    fa3 = module("sgl_kernel.flash_attn", device) or module("flash_attn_interface", device)
    if fa3 is None or x.k_pool.dtype != x.q.dtype:
        return ()
    attend, seq_lens = fa3.flash_attn_with_kvcache, x.seq_lens

    def chain() -> Any:
        return attend(x.q, x.k_pool, x.v_pool, cache_seqlens=seq_lens, page_table=x.page_table, causal=True)

    baselines = [Baseline("fa3 causal chain", chain, check_chain)]
    if x.q.shape[1] == 1 and hasattr(fa3, "get_scheduler_metadata"):
        baselines.append(Baseline("fa3 decode", decode(x, fa3), check_chain))
    merging = module("sgl_kernel", device)
    is_chain = torch.equal(x.tree, torch.ones_like(x.tree).tril())
    if merging is not None and not is_chain:
        baselines.append(Baseline("fa3 two passes", two_passes(x, attend, merging.merge_state_v2), check))
    return that_run(*baselines)


def decode(x: PagedTrees, fa3: Any) -> Callable[[], Tensor]:
    """Return a call for one row per request. The first one computes the schedule of tiles, which the others reuse."""
    batch, _, heads, head_dim = x.q.shape
    seq_lens, cu_seqlens_q = x.seq_lens, torch.arange(batch + 1, dtype=torch.int32, device=x.q.device)

    @cache
    def schedule() -> Any:
        return fa3.get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=int(seq_lens.max()), num_heads=heads,
            num_heads_k=x.k_pool.shape[2], headdim=head_dim, cache_seqlens=seq_lens, qkv_dtype=x.q.dtype,
            cu_seqlens_q=cu_seqlens_q, page_size=x.page_size, causal=True,
        )  # fmt: skip

    def call() -> Tensor:
        out: Tensor = fa3.flash_attn_with_kvcache(
            x.q.flatten(0, 1), x.k_pool, x.v_pool, cache_seqlens=seq_lens, page_table=x.page_table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1, causal=True, scheduler_metadata=schedule(),
        )  # fmt: skip
        return out.view(x.q.shape)

    return call


def two_passes(x: PagedTrees, attend: Any, merge: Any) -> Callable[[], Tensor]:
    """Return a call of both passes and their merge."""
    batch, nodes, heads, head_dim = x.q.shape
    # Pages of one row, and the rows that each query row attends to: computed once per step for all layers.
    k_rows, v_rows = (pool.view(-1, 1, *pool.shape[2:]) for pool in (x.k_pool, x.v_pool))
    own_rows, counts = rows_of_nodes(x)
    own_q = x.q.view(batch * nodes, 1, heads, head_dim)

    def call() -> Tensor:
        prefix, prefix_lse, *_ = attend(
            x.q, x.k_pool, x.v_pool, cache_seqlens=x.prefix_lens, page_table=x.page_table, causal=False,
            return_softmax_lse=True,
        )  # fmt: skip
        tail, tail_lse, *_ = attend(
            own_q, k_rows, v_rows, cache_seqlens=counts, page_table=own_rows, causal=False, return_softmax_lse=True
        )
        # [B, Hq, N] and [B N, Hq, 1] to [B N, Hq]
        lse = prefix_lse.transpose(1, 2).reshape(batch * nodes, heads).contiguous()
        out: Tensor = merge(prefix.flatten(0, 1), lse, tail.flatten(0, 1), tail_lse.flatten(1).contiguous())[0]
        return out.view(x.q.shape)

    return call
