"""Gemma 3: Gemma 2 with norms of query and key heads, and another rotation in layers with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from .base import register
from .gemma2 import Gemma2


@register
class Gemma3(Gemma2):
    model_type = "gemma3_text"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        q_norm, k_norm = (layout.norm(self.norm(norm)) for norm in (module.q_norm, module.k_norm))
        # transformers ignores the soft cap that its config may carry.
        return replace(super().attention(index, module, layout), q_norm=q_norm, k_norm=k_norm, soft_cap=None)

    def rotation(self, index: int) -> str:
        kind: str = self.config.layer_types[index]
        return kind
