"""OLMo: Llama with LayerNorms without weights, and clamped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.norm import LayerNorm
from .base import register
from .llama import Llama
from .olmoe import clamped


@register
class Olmo(Llama):
    model_type = "olmo"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        return replace(plain, qkv=clamped(plain.qkv, self.config.clip_qkv))

    def norm(self, module: Any) -> LayerNorm:
        return LayerNorm(None, None, 1e-5)
