"""GLM: Llama that rotates neighbours, in the first numbers of each head alone, with gate and up in one projection.

GLM-4 has norms behind its parts too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from .base import register
from .llama import Llama
from .phi3 import fused_mlp


@register
class Glm(Llama):
    model_type = "glm"
    interleaved = True

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return fused_mlp(module)


@register
class Glm4(Glm):
    model_type = "glm4"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return replace(
            super().layer(index, module, layout),
            post_attention_norm=self.norm(module.post_self_attn_layernorm),
            post_feed_forward_norm=self.norm(module.post_mlp_layernorm),
        )
