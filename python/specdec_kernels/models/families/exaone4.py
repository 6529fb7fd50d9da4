"""EXAONE 4: norms behind its parts, norms of query and key heads, and a sliding window in most layers; others do not
rotate. K-EXAONE is the same with norms before its parts, and experts behind the first layers."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Heads
from ..layers.linear import FeedForward, Layer
from .base import register
from .glm4_moe import sigmoid_routed
from .llama import gated
from .olmo2 import with_norms_behind
from .qwen3 import Qwen3


@register
class ExaoneMoe(Qwen3):
    model_type = "exaone_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return sigmoid_routed(module) if hasattr(module, "experts") else gated(module)

    def rotation(self, index: int) -> str | None:
        return "" if self.config.sliding_window is None or self.window(index) is not None else None


@register
class Exaone4(ExaoneMoe):
    model_type = "exaone4"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        attention = self.attention(index, module.self_attn, heads)
        return with_norms_behind(module, attention, self.feed_forward(index, module.mlp))
