"""GLM-4.5: Llama that rotates a part of each head, with experts after the first layers and a shared expert."""

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
from .qwen3_moe import experts_of


@register
class Glm4Moe(Llama):
    model_type = "glm4_moe"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        part = super().attention(index, module, layout)
        if self.config.use_qk_norm:
            q_norm, k_norm = (layout.norm(rms_norm_of(norm)) for norm in (module.q_norm, module.k_norm))
            part = replace(part, q_norm=q_norm, k_norm=k_norm)
        return part

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of the first `first_k_dense_replace`
            return gated_mlp(module)
        return deepseek_moe(module)


def sigmoid_router(gate: Any) -> SigmoidRouter:
    """Return the router of a module with the names of DeepSeek-V3's."""
    return SigmoidRouter(
        weight=gate.weight.detach(),
        e_score_correction_bias=gate.e_score_correction_bias,
        top_k=gate.top_k,
        n_group=gate.num_group,
        topk_group=gate.topk_group,
        norm_topk_prob=gate.norm_topk_prob,
        routed_scaling_factor=gate.routed_scaling_factor,
    )


def deepseek_moe(module: Any) -> MoE:
    """Return DeepSeek-V3's MoE: experts by a sigmoid router, and a shared expert."""
    return MoE(sigmoid_router(module.gate), experts_of(module.experts), gated_mlp(module.shared_experts))
