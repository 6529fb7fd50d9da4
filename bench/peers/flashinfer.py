"""FlashInfer's sampling kernels. They know no trees: every node's row is sampled, then the tree is walked in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import module

SEED, OFFSET = 0, 0  # given, because drawing them from torch's generator is nothing a CUDA graph can hold


def sample_every_node(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], Tensor] | None:
    """What samples a token [B, N] from each row of logits [B, N, V], or None where flashinfer cannot run."""
    ops = module("flashinfer.sampling", logits.device)
    if ops is None:
        return None
    batch, nodes, vocab = logits.shape
    count, device = batch * nodes, logits.device
    temperatures = torch.full((count,), temperature, device=device)
    top_ks = torch.full((count,), top_k, dtype=torch.int32, device=device)
    top_ps = torch.full((count,), top_p, device=device)

    def sample() -> Tensor:
        rows = logits.view(count, vocab).float()
        if top_k > 0:
            rows = ops.top_k_mask_logits(rows, top_ks)
        probs = ops.softmax(rows, temperatures)
        if top_p < 1:
            tokens = ops.top_p_sampling_from_probs(probs, top_ps, seed=SEED, offset=OFFSET)
        else:
            tokens = ops.sampling_from_probs(probs, seed=SEED, offset=OFFSET)
        return tokens.view(batch, nodes)

    return sample
