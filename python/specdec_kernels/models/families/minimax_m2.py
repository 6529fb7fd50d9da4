"""MiniMax M2: Llama with norms over all query or key heads, partly rotated heads, and experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SigmoidRouter
from ..layers.norm import rms_norm_of
from .base import register
from .llama import Llama
from .olmoe import RMSNormedQK
from .qwen3_moe import experts_of


@register
class MiniMaxM2(Llama):
    model_type = "minimax_m2"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        norms = layout.norm(rms_norm_of(module.q_norm)), layout.norm(rms_norm_of(module.k_norm))
        return replace(plain, qkv=RMSNormedQK(plain.qkv, *norms))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        router = SigmoidRouter(module.gate.weight.detach(), module.e_score_correction_bias, module.gate.top_k)
        return MoE(router, experts_of(module.experts))
