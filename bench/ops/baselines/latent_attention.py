"""Multi-head latent attention of SGLang's packages: FlashMLA, and FlashAttention-3 in two passes.

Written for sgl-flash-mla 1.0.0 and sglang-kernel 0.4.10, which sglang 0.5.23 has.

FlashMLA has no tree masks: its causal chain reads the rows that a tree reads, a lower bound. FlashAttention-3 takes the
latent part of queries as `qv`; a tree takes two passes and a merge, as in SGLang's `fa3` backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..harness import Baseline
from . import module, that_run
from .paged import PagedTrees, rows_of_nodes

FLASH_MLA_PAGE = 64


def mla_tree_attention(
    x: PagedTrees, scale: float, check: Callable[[Tensor], None], check_chain: Callable[[Tensor], None]
) -> Sequence[Baseline]:
    """Return the baselines of mla_tree_attention that run here."""
    device, baselines = x.q.device, []
    flash_mla = module("flash_mla", device)
    if x.k_pool.dtype != x.q.dtype:
        return ()
    if flash_mla is not None and x.page_size == FLASH_MLA_PAGE:
        baselines.append(Baseline("flashmla causal chain", chain(x, scale, flash_mla), check_chain))
    fa3, merging = module("sgl_kernel.flash_attn", device), module("sgl_kernel", device)
    if fa3 is not None and merging is not None:
        call = two_passes(x, scale, fa3.flash_attn_with_kvcache, merging.merge_state_v2)
        baselines.append(Baseline("fa3 two passes", call, check))
    return that_run(*baselines)


def chain(x: PagedTrees, scale: float, flash_mla: Any) -> Callable[[], Tensor]:
    """Return FlashMLA's call; its schedule of tiles is computed once per step for all layers.

    Dense decoding is on the "legacy" side of sgl-flash-mla 1.0, which has the kernels for Hopper.
    """
    nodes, heads = x.q.shape[1:3]
    seq_lens, latent = x.seq_lens, x.v_pool.shape[-1]
    schedule, _ = flash_mla.get_mla_metadata()
    schedule.tile_scheduler_metadata, schedule.num_splits = flash_mla.get_mla_decoding_metadata(
        seq_lens, nodes * heads, 1, use_legacy=True
    )

    def call() -> Tensor:
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            x.q, x.k_pool, x.page_table, seq_lens, latent, schedule, softmax_scale=scale, causal=True, use_legacy=True
        )[0]
        return out

    return call


def two_passes(x: PagedTrees, scale: float, attend: Any, merge: Any) -> Callable[[], Tensor]:
    """Return a call of both passes and their merge."""
    batch, nodes, heads, _ = x.q.shape
    latent = x.v_pool.shape[-1]
    keys, values = x.k_pool[..., latent:], x.k_pool[..., :latent]
    key_rows, value_rows = (pool.flatten(0, 1)[:, None] for pool in (keys, values))
    own_rows, counts = rows_of_nodes(x)
    rotated, absorbed = x.q[..., latent:], x.q[..., :latent]
    own = [part.reshape(batch * nodes, 1, heads, -1) for part in (rotated, absorbed)]

    def call() -> Tensor:
        prefix, prefix_lse, *_ = attend(
            rotated, keys, values, qv=absorbed, cache_seqlens=x.prefix_lens, page_table=x.page_table, causal=False,
            softmax_scale=scale, return_softmax_lse=True,
        )  # fmt: skip
        tail, tail_lse, *_ = attend(
            own[0], key_rows, value_rows, qv=own[1], cache_seqlens=counts, page_table=own_rows, causal=False,
            softmax_scale=scale, return_softmax_lse=True,
        )  # fmt: skip
        lse = prefix_lse.transpose(1, 2).reshape(batch * nodes, heads).contiguous()
        out: Tensor = merge(prefix.flatten(0, 1), lse, tail.flatten(0, 1), tail_lse.flatten(1).contiguous())[0]
        return out.view(batch, nodes, heads, latent)

    return call
