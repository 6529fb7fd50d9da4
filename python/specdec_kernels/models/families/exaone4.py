"""EXAONE 4: norms behind its parts, norms of query and key heads, and a sliding window in most layers; others do not
rotate. K-EXAONE is the same with norms before its parts, and experts behind the first layers."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from .base import register
from .glm4_moe import deepseek_moe
from .llama import gated_mlp
from .olmo2 import post_norm_layer
from .qwen3 import Qwen3


@register
class ExaoneMoe(Qwen3):
    model_type = "exaone_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return deepseek_moe(module) if hasattr(module, "experts") else gated_mlp(module)

    def rotation(self, index: int) -> str | None:
        return "" if self.config.sliding_window is None or self.window(index) is not None else None


@register
class Exaone4(ExaoneMoe):
    model_type = "exaone4"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        attention = self.attention(index, module.self_attn, layout)
        return post_norm_layer(module, attention, self.feed_forward(index, module.mlp))
