"""The language model of Qwen3.5: Qwen3-Next whose projections of delta nets are one linear for each part."""

from __future__ import annotations

from typing import Any

from ..layers.linear import Projections, SplitProjection, fused
from ..layers.quantized import QuantizedLinear
from .base import register
from .qwen3_next import Qwen3Next, separate


@register
class Qwen35(Qwen3Next):
    model_type = "qwen3_5_text"

    def in_proj(self, module: Any) -> Projections:
        rows, gates = (module.in_proj_qkv, module.in_proj_z), (module.in_proj_b, module.in_proj_a)
        if any(isinstance(linear, QuantizedLinear) for linear in (*rows, *gates)):
            return separate(fused(*rows), fused(*gates), self.in_proj_sizes)
        return SplitProjection(fused(*rows, *gates), self.in_proj_sizes)
