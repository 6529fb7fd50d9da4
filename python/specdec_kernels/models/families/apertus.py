"""Apertus: Llama with norms of query and key heads, and an MLP without a gate, of xIELU."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from .base import register
from .qwen3 import Qwen3


@register
class Apertus(Qwen3):
    model_type = "apertus"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.attention_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            pre_feed_forward_norm=self.norm(module.feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.up_proj), linear_of(module.down_proj), module.act_fn)

    def window(self, index: int) -> int | None:
        return None
