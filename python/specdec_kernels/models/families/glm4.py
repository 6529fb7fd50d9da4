"""GLM-4: GLM with norms after its parts too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from .base import register
from .glm import Glm


@register
class Glm4(Glm):
    model_type = "glm4"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return replace(
            super().layer(index, module, layout),
            post_attention_norm=self.norm(module.post_self_attn_layernorm),
            post_feed_forward_norm=self.norm(module.post_mlp_layernorm),
        )
