"""Gemma 2: Gemma with norms after its parts too, soft caps, and a sliding window in every second layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.embedding import LMHead
from ..layers.head_layout import HeadLayout
from .base import register, window_of
from .gemma import Gemma


@register
class Gemma2(Gemma):
    model_type = "gemma2"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            post_attention_norm=self.norm(module.post_attention_layernorm),
            pre_feed_forward_norm=self.norm(module.pre_feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
            post_feed_forward_norm=self.norm(module.post_feedforward_layernorm),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        return replace(super().attention(index, module, layout), soft_cap=self.config.attn_logit_softcapping)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(soft_cap=self.config.final_logit_softcapping)

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)
