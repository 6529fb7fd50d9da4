"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from ..layers.moe import MoE
from .base import register
from .mistral import Mistral
from .qwen3_moe import experts_of, softmax_router


@register
class Mixtral(Mistral):
    model_type = "mixtral"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MoE(softmax_router(module.gate, norm_topk_prob=True), experts_of(module.experts))
