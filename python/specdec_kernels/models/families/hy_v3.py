"""Hunyuan 3 (HY3): Qwen3 with experts after the first layers, and a shared expert."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SigmoidRouter
from .base import register
from .llama import gated_mlp
from .qwen3 import Qwen3
from .qwen3_moe import experts_of


@register
class HyV3(Qwen3):
    model_type = "hy_v3"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated_mlp(module)
        router = SigmoidRouter(
            weight=module.gate.weight.detach(),
            e_score_correction_bias=module.e_score_correction_bias,
            top_k=module.gate.top_k,
            routed_scaling_factor=module.gate.router_scaling_factor,
        )
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_experts))

    def window(self, index: int) -> int | None:
        return None
