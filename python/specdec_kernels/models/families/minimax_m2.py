"""MiniMax M2: Llama with norms of whole rows of queries and keys, heads that rotate in part, and experts in all layers.
Hunyuan 3 (HY3): Qwen3 with such experts behind the first layers, and one that all rows take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SigmoidRouter
from ..layers.norm import rms_norm_of
from .base import register
from .llama import Llama, gated_mlp
from .olmoe import RMSNormedQK
from .qwen3 import Qwen3
from .qwen3_moe import experts_of


@register
class MiniMaxM2(Llama):
    model_type = "minimax_m2"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        norms = layout.norm(rms_norm_of(module.q_norm)), layout.norm(rms_norm_of(module.k_norm))
        return replace(plain, qkv=RMSNormedQK(plain.qkv, *norms))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MoE(ungrouped_router(module), experts_of(module.experts))


@register
class HyV3(Qwen3):
    model_type = "hy_v3"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated_mlp(module)
        router = ungrouped_router(module, module.gate.router_scaling_factor)
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_experts))

    def window(self, index: int) -> int | None:
        return None


def ungrouped_router(module: Any, factor: float = 1.0) -> SigmoidRouter:
    return SigmoidRouter(
        weight=module.gate.weight.detach(),
        e_score_correction_bias=module.e_score_correction_bias,
        top_k=module.gate.top_k,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=factor,
    )
