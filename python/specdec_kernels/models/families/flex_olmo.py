"""FlexOlmo: OLMo 2 with OLMoE's experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from ..layers.moe import MoE
from .base import register
from .olmo2 import Olmo2
from .qwen3_moe import experts_of, softmax_router


@register
class FlexOlmo(Olmo2):
    model_type = "flex_olmo"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MoE(softmax_router(module.gate, module.gate.norm_topk_prob), experts_of(module.experts))
