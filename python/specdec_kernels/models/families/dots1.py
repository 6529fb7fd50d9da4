"""dots.llm1: Qwen3 with DeepSeek-V3's experts behind the first layers."""

from __future__ import annotations

from typing import Any

from ..layers.linear import FeedForward
from .base import register
from .glm4_moe import sigmoid_routed
from .llama import gated
from .qwen3 import Qwen3


@register
class Dots1(Qwen3):
    model_type = "dots1"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return sigmoid_routed(module) if hasattr(module, "experts") else gated(module)
