"""Qwen2-MoE: Qwen2 with experts in most layers, and a shared expert with a gate of its own."""

from __future__ import annotations

from typing import Any

from ..layers.linear import linear_of
from ..layers.mlp import FeedForward
from ..layers.moe import MoE
from .base import register
from .llama import gated_mlp
from .qwen2 import Qwen2
from .qwen3_moe import experts_of, softmax_router


@register
class Qwen2Moe(Qwen2):
    model_type = "qwen2_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return shared_moe(module)


def shared_moe(module: Any) -> FeedForward:
    """Return a layer's experts with the shared one and its gate, or its MLP if it has no experts."""
    if not hasattr(module, "experts"):
        return gated_mlp(module)
    norm_topk_prob = getattr(module.gate, "norm_topk_prob", True)  # Qwen3.5 always normalizes
    router = softmax_router(module.gate, norm_topk_prob, linear_of(module.shared_expert_gate))
    return MoE(router, experts_of(module.experts), gated_mlp(module.shared_expert))
