"""Starcoder 2: Llama with LayerNorms, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.norm import LayerNorm, layer_norm_of
from .base import register
from .llama import Llama


@register
class Starcoder2(Llama):
    model_type = "starcoder2"

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.c_fc), linear_of(module.c_proj), module.act)

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window
