"""Hunyuan: Llama with norms of query and key heads behind the rotation; and the same with experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SoftmaxRouter
from ..layers.norm import RMSNorm
from .base import register
from .llama import Llama, gated_mlp
from .qwen3_moe import experts_of


@register
class HunYuanDense(Llama):
    model_type = "hunyuan_v1_dense"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        # A rotation leaves mean squares alone, so that normalised heads may be rotated, but for the weights: those of
        # queries and keys meet in the scores, number by number, and both multiply rotated queries. Angles of a length
        # other than 1 (YaRN) are a factor that the norm behind them takes away again, up to eps.
        q_weight, k_weight = module.query_layernorm.weight.detach(), module.key_layernorm.weight.detach()
        square = layout.rotations[0, 0] ** 2
        plain_norm = RMSNorm(torch.ones_like(q_weight), module.query_layernorm.variance_epsilon / square.item())
        norm = layout.norm(plain_norm)
        factors = layout.permute(q_weight.float() * k_weight.float() / square)
        return replace(
            super().attention(index, module, layout),
            q_norm=norm,
            k_norm=norm,
            q_factors=factors[None].to(q_weight.dtype),
        )


@register
class HunYuanMoE(HunYuanDense):
    model_type = "hunyuan_v1_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        router = SoftmaxRouter(linear_of(module.gate.wg), module.gate.top_k, norm_topk_prob=True)
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_mlp))
