"""gpt-oss: Llama with experts in all layers, windows in every second one, and an attention sink for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import FeedForward
from ..layers.moe import Experts, MoE, SoftmaxRouter
from ..layers.reduction import reduction_of
from .base import register, window_of
from .llama import Llama


@register
class GptOss(Llama):
    model_type = "gpt_oss"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        return replace(super().attention(index, module, layout), sinks=module.sinks.detach())

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        experts = module.experts
        alpha, limit = float(experts.alpha), float(experts.limit)

        def gate(wide: Tensor) -> Tensor:
            """Return the clamped SwiGLU of columns that alternate between gates and ups."""
            gates, ups = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
            return (ups + 1) * gates * torch.sigmoid(gates * alpha)

        return MoE(
            SoftmaxRouter.of(linear_of(module.router), module.router.top_k, norm_topk_prob=True),
            Experts(
                experts.gate_up_proj.detach(),
                experts.down_proj.detach(),
                experts.gate_up_proj_bias.detach(),
                experts.down_proj_bias.detach(),
                gate,
                reduction_of(experts),
            ),
        )
