"""OLMoE: Llama with experts in all layers, and norms of whole rows of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Attention, Heads, Projection
from ..layers.linear import FeedForward, Norm, norm_of
from ..layers.moe import ExpertFeedForward
from .base import register
from .llama import Llama
from .qwen3_moe import experts_of, softmax_router


@dataclass(frozen=True)
class NormedProduct:
    """Queries, keys and values of which the first two are normalised over all their heads together."""

    product: Projection
    q_norm: Norm
    k_norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads * head_dim] from [T, in]."""
        widths = [len(self.q_norm.weight), len(self.k_norm.weight), len(self.k_norm.weight)]
        q, k, v = torch.split(self.product(x), widths, -1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], -1)


@register
class Olmoe(Llama):
    model_type = "olmoe"

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        plain = super().attention(index, module, heads)
        norms = heads.norm(norm_of(module.q_norm)), heads.norm(norm_of(module.k_norm))
        return replace(plain, qkv=clipped(NormedProduct(plain.qkv, *norms), self.config.clip_qkv))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return ExpertFeedForward(softmax_router(module.gate, module.gate.norm_topk_prob), experts_of(module.experts))


def clipped(product: Projection, largest: float | None) -> Projection:
    """Of numbers that are at most `largest` in magnitude; None: as they are."""
    return product if largest is None else lambda x: product(x).clamp(-largest, largest)
