"""FlashInfer: attention with a mask, and sampling.

Its sampling kernels have no trees: every node's row is sampled, then the tree is walked in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..harness import Baseline
from . import module, that_run
from .paged import PagedTrees
from .sampling import Sampling

SEED, OFFSET = 0, 0  # fixed: drawing them from torch's generator cannot be captured in a CUDA graph


def sample_every_node(logits: Tensor, sampling: Sampling) -> Callable[[], Tensor] | None:
    """Return a call that samples a token [B, N] from each row of logits [B, N, V], None where flashinfer cannot run."""
    ops = module("flashinfer.sampling", logits.device)
    if ops is None:
        return None
    batch, nodes, vocab = logits.shape
    count, device = batch * nodes, logits.device
    temperatures = torch.full((count,), sampling.temperature, device=device)
    top_ks = torch.full((count,), sampling.top_k, dtype=torch.int32, device=device)
    top_ps = torch.full((count,), sampling.top_p, device=device)

    def sample() -> Tensor:
        rows = logits.view(count, vocab).float()
        if sampling.top_k > 0:
            rows = ops.top_k_mask_logits(rows, top_ks)
        probs = ops.softmax(rows, temperatures)
        if sampling.top_p < 1:
            tokens = ops.top_p_sampling_from_probs(probs, top_ps, seed=SEED, offset=OFFSET)
        else:
            tokens = ops.sampling_from_probs(probs, seed=SEED, offset=OFFSET)
        by_node: Tensor = tokens.view(batch, nodes)
        return by_node

    return sample


WORKSPACE_BYTES = 256 << 20
XQA_PAGE_SIZES = (16, 32, 64, 128)


def tree_attention(x: PagedTrees, check: Callable[[Tensor], None]) -> Sequence[Baseline]:
    """Return two baselines: a mask bit per query row and KV row, and XQA, with the mask of the tree alone.

    The host's planning of the first is not timed.
    """
    device = x.q.device
    prefill, decode = module("flashinfer.prefill", device), module("flashinfer.decode", device)
    if prefill is None or decode is None or x.k_pool.dtype != x.q.dtype:
        return ()
    batch, nodes, heads, head_dim = x.q.shape
    lens = x.prefix_lens.tolist()
    pages = [-(-(length + nodes) // x.page_size) for length in lens]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(device, "plan"), "NHD")
    wrapper.plan(
        ints([b * nodes for b in range(batch + 1)]),
        ints([sum(pages[:b]) for b in range(batch + 1)]),
        torch.cat([row[:count] for row, count in zip(x.page_table, pages, strict=True)]),
        ints([(length + nodes - 1) % x.page_size + 1 for length in lens]),
        heads,
        x.k_pool.shape[2],
        head_dim,
        x.page_size,
        custom_mask=torch.cat(
            [
                torch.cat([torch.ones(nodes, length, dtype=torch.bool, device=device), x.tree[b]], 1).flatten()
                for b, length in enumerate(lens)
            ]
        ),
        q_data_type=x.q.dtype,
        kv_data_type=x.k_pool.dtype,
    )
    flat_q = x.q.view(batch * nodes, heads, head_dim)

    def with_custom_mask() -> Tensor:
        out: Tensor = wrapper.run(flat_q, (x.k_pool, x.v_pool))
        return out.view(x.q.shape)

    seq_lens = x.seq_lens.to(torch.uint32)
    max_len = x.page_table.shape[1] * x.page_size
    bits = x.mask.view(torch.uint16)[..., : -(-nodes // 32) * 2].contiguous()

    def xqa() -> Tensor:
        out: Tensor = decode.xqa_batch_decode_with_kv_cache(
            flat_q, (x.k_pool, x.v_pool), workspace(device, "xqa"), x.page_table, seq_lens, max_len,
            bmm1_scale=head_dim**-0.5, kv_layout="NHD", q_len_per_req=nodes, mask=bits,
        )  # fmt: skip
        return out.view(x.q.shape)

    baselines = [Baseline("flashinfer custom mask", with_custom_mask, check)]
    if x.page_size in XQA_PAGE_SIZES and nodes > 1:
        baselines.append(Baseline("flashinfer xqa", xqa, check))
    return that_run(*baselines)


@cache
def workspace(device: torch.device, _user: str) -> Tensor:
    """Return zeros as the workspace: XQA counts in it and resets it to zero."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
