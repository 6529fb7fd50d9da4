"""Qwen3: Qwen2 with norms of query and key heads instead of the biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.norm import rms_norm_of
from .base import register
from .qwen2 import Qwen2


@register
class Qwen3(Qwen2):
    model_type = "qwen3"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        q_norm, k_norm = (layout.norm(rms_norm_of(norm)) for norm in (module.q_norm, module.k_norm))
        return replace(super().attention(index, module, layout), q_norm=q_norm, k_norm=k_norm)
