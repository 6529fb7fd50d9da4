"""VaultGemma: Gemma 2 without norms after its parts."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from .base import register
from .gemma2 import Gemma2


@register
class VaultGemma(Gemma2):
    model_type = "vaultgemma"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            pre_feed_forward_norm=self.norm(module.pre_feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )
