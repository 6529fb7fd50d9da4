"""OLMoE: Llama with experts in all layers, and norms over all query or key heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection
from ..layers.mlp import FeedForward
from ..layers.moe import MoE
from ..layers.norm import RMSNorm, rms_norm_of
from .base import register
from .llama import Llama
from .qwen3_moe import experts_of, softmax_router


@dataclass(frozen=True)
class RMSNormedQK:
    """A projection of queries, keys and values with RMSNorms over all query and over all key heads."""

    projection: Projection
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, heads * head_dim] from [T, in]."""
        widths = [len(self.q_norm.weight), len(self.k_norm.weight), len(self.k_norm.weight)]
        q, k, v = torch.split(self.projection(x), widths, -1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], -1)


@register
class Olmoe(Llama):
    model_type = "olmoe"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        norms = layout.norm(rms_norm_of(module.q_norm)), layout.norm(rms_norm_of(module.k_norm))
        return replace(plain, qkv=clamped(RMSNormedQK(plain.qkv, *norms), self.config.clip_qkv))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MoE(softmax_router(module.gate, module.gate.norm_topk_prob), experts_of(module.experts))


def clamped(projection: Projection, largest: float | None) -> Projection:
    """Clamp a projection's output to magnitudes of at most `largest`; None: not at all."""
    return projection if largest is None else lambda x: projection(x).clamp(-largest, largest)
