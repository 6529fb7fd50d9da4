"""Bamba: Mamba 2 in most layers, attention that rotates half of each head in the others."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.mixer import Mixer
from .base import register
from .hybrid import Mamba2Hybrid


@register
class Bamba(Mamba2Hybrid):
    model_type = "bamba"
    last_norm_name = "final_layernorm"

    @property
    def types(self) -> list[str]:
        kinds: list[str] = self.config.layers_block_type
        return kinds

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.mixer(index, module, layout),
            pre_feed_forward_norm=self.norm(module.pre_ff_layernorm),
            feed_forward=self.feed_forward(index, module.feed_forward),
        )

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        if hasattr(module, "mamba"):
            return self.mamba(module.mamba)
        return self.attention(index, module.self_attn, layout)
