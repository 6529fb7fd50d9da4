"""dots.llm1: Qwen3 with DeepSeek-V3's experts after the first layers."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from .base import register
from .glm4_moe import deepseek_moe
from .llama import gated_mlp
from .qwen3 import Qwen3


@register
class Dots1(Qwen3):
    model_type = "dots1"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return deepseek_moe(module) if hasattr(module, "experts") else gated_mlp(module)
