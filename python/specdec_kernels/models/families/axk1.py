"""A.X-K1: DeepSeek-V3 with a norm after the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from .base import register
from .deepseek_v3 import DeepseekV3


@register
class AXK1(DeepseekV3):
    model_type = "axk1"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        part = super().layer(index, module, layout)
        if not hasattr(module.mlp, "experts"):
            return part
        return replace(part, post_feed_forward_norm=self.norm(module.mlp.post_mlp_layernorm))
