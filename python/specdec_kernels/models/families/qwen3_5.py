"""The language model of Qwen3.5: Qwen3-Next whose projections of delta nets are one linear for each part."""

from __future__ import annotations

from typing import Any

from ..layers.linear import Projection, fused
from .base import register
from .qwen3_next import Qwen3Next


@register
class Qwen35(Qwen3Next):
    model_type = "qwen3_5_text"

    def in_proj(self, module: Any) -> Projection:
        return fused(module.in_proj_qkv, module.in_proj_z)

    def gates_proj(self, module: Any) -> Projection:
        return fused(module.in_proj_b, module.in_proj_a)
