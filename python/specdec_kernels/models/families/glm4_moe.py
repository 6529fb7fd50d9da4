"""GLM-4.5: Llama whose heads rotate in part, with experts behind the first layers and one that all rows take. Solar
Open has them in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import FeedForward, norm_of
from ..layers.moe import ExpertFeedForward, SigmoidRouter
from .base import register
from .llama import Llama, gated
from .qwen3_moe import experts_of


@register
class Glm4Moe(Llama):
    model_type = "glm4_moe"

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        part = super().attention(index, module, heads)
        if self.config.use_qk_norm:
            q_norm, k_norm = (heads.norm(norm_of(norm)) for norm in (module.q_norm, module.k_norm))
            part = replace(part, q_norm=q_norm, k_norm=k_norm)
        return part

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of the first `first_k_dense_replace`
            return gated(module)
        return sigmoid_routed(module)


@register
class SolarOpen(Llama):
    model_type = "solar_open"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return sigmoid_routed(module)


def sigmoid_routed(module: Any) -> ExpertFeedForward:
    """Experts by DeepSeek-V3's choice, and one that all rows take."""
    gate = module.gate
    router = SigmoidRouter(
        weight=gate.weight.detach(),
        correction=gate.e_score_correction_bias,
        taken=gate.top_k,
        groups=gate.num_group,
        groups_taken=gate.topk_group,
        normalised=gate.norm_topk_prob,
        factor=gate.routed_scaling_factor,
    )
    return ExpertFeedForward(router, experts_of(module.experts), gated(module.shared_experts))
