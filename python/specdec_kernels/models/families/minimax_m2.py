"""MiniMax M2: Llama with norms of whole rows of queries and keys, heads that rotate in part, and experts in all layers.
Hunyuan 3 (HY3): Qwen3 with such experts behind the first layers, and one that all rows take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import FeedForward, norm_of
from ..layers.moe import ExpertFeedForward, SigmoidRouter
from .base import register
from .llama import Llama, gated
from .olmoe import NormedProduct
from .qwen3 import Qwen3
from .qwen3_moe import experts_of


@register
class MiniMaxM2(Llama):
    model_type = "minimax_m2"

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        plain = super().attention(index, module, heads)
        norms = heads.norm(norm_of(module.q_norm)), heads.norm(norm_of(module.k_norm))
        return replace(plain, qkv=NormedProduct(plain.qkv, *norms))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return ExpertFeedForward(ungrouped_router(module), experts_of(module.experts))


@register
class HyV3(Qwen3):
    model_type = "hy_v3"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated(module)
        router = ungrouped_router(module, module.gate.router_scaling_factor)
        return ExpertFeedForward(router, experts_of(module.experts), gated(module.shared_experts))

    def window(self, index: int) -> int | None:
        return None


def ungrouped_router(module: Any, factor: float = 1.0) -> SigmoidRouter:
    return SigmoidRouter(
        weight=module.gate.weight.detach(),
        correction=module.e_score_correction_bias,
        taken=module.gate.top_k,
        groups=1,
        groups_taken=1,
        normalised=True,
        factor=factor,
    )
