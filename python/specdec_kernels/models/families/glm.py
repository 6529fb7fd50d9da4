"""GLM: Llama that rotates neighbours, in the first numbers of each head alone, with gate and up in one projection.

GLM-4 has norms behind its parts too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Heads
from ..layers.linear import FeedForward, Layer
from .base import register
from .llama import Llama
from .phi3 import fused


@register
class Glm(Llama):
    model_type = "glm"
    interleaved = True

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return fused(module)


@register
class Glm4(Glm):
    model_type = "glm4"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return replace(
            super().layer(index, module, heads),
            behind_attention=self.norm(module.post_self_attn_layernorm),
            behind_feed_forward=self.norm(module.post_mlp_layernorm),
        )
