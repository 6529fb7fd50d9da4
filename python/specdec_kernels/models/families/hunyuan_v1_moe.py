"""Hunyuan with experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.linear import linear_of
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SoftmaxRouter
from .base import register
from .hunyuan_v1_dense import HunYuanDense
from .llama import gated_mlp
from .qwen3_moe import experts_of


@register
class HunYuanMoE(HunYuanDense):
    model_type = "hunyuan_v1_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        router = SoftmaxRouter.of(linear_of(module.gate.wg), module.gate.top_k, norm_topk_prob=True)
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_mlp))
