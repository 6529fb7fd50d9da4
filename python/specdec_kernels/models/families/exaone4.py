"""EXAONE 4: norms after its parts, norms of query and key heads, and a sliding window in most layers.

Layers without a window do not rotate.
"""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from .base import register
from .exaone_moe import ExaoneMoe
from .olmo2 import post_norm_layer


@register
class Exaone4(ExaoneMoe):
    model_type = "exaone4"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        attention = self.attention(index, module.self_attn, layout)
        return post_norm_layer(module, attention, self.feed_forward(index, module.mlp))
