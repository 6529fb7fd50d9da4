"""Apertus: Llama with norms of query and key heads, and a feed-forward part without a gate, of xIELU."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Heads
from ..layers.linear import FeedForward, Layer, PlainFeedForward, product_of
from .base import register
from .qwen3 import Qwen3


@register
class Apertus(Qwen3):
    model_type = "apertus"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return Layer(
            input_norm=self.norm(module.attention_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            middle_norm=self.norm(module.feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return PlainFeedForward(product_of(module.up_proj), product_of(module.down_proj), module.act_fn)

    def window(self, index: int) -> int | None:
        return None
