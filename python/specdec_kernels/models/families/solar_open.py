"""Solar Open: Llama with DeepSeek-V3's experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from .base import register
from .glm4_moe import deepseek_moe
from .llama import Llama


@register
class SolarOpen(Llama):
    model_type = "solar_open"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return deepseek_moe(module)
