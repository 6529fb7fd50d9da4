"""K-EXAONE: EXAONE 4 with norms before its parts, and experts after the first layers."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from .base import register
from .glm4_moe import deepseek_moe
from .llama import gated_mlp
from .qwen3 import Qwen3


@register
class ExaoneMoe(Qwen3):
    model_type = "exaone_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return deepseek_moe(module) if hasattr(module, "experts") else gated_mlp(module)

    def rotation(self, index: int) -> str | None:
        return "" if self.config.sliding_window is None or self.window(index) is not None else None
