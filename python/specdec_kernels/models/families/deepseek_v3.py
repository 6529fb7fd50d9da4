"""DeepSeek-V3 and R1: latent attention, and after the first layers experts by a sigmoid, from the best groups."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from .base import register
from .glm4_moe import deepseek_moe
from .latent import Latent
from .llama import gated_mlp


@register
class DeepseekV3(Latent):
    model_type = "deepseek_v3"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return deepseek_moe(module) if hasattr(module, "experts") else gated_mlp(module)
