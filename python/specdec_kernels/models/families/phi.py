"""Phi-1, 1.5 and 2: StableLM with parallel layers, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.norm import LayerNorm
from .base import register
from .stablelm import StableLm


@register
class Phi(StableLm):
    model_type = "phi"
    out_name = "dense"
    last_norm_name = "final_layernorm"

    def division(self) -> dict[str, Any]:
        return {}

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return self.parallel_layer(index, module, layout)

    def stacked_norm(self, module: Any) -> LayerNorm:
        return self.norm(module)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.fc1), linear_of(module.fc2), module.activation_fn)
