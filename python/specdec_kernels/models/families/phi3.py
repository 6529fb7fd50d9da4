"""Phi-3 and Phi-4: Llama whose checkpoints have one projection of queries, keys and values, and one of gate and up."""

from __future__ import annotations

from typing import Any

from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection, linear_of
from ..layers.mlp import FeedForward, GatedMLP, activation_of
from .base import head_dim_of, register
from .llama import Llama


@register
class Phi3(Llama):
    model_type = "phi3"

    def division(self) -> dict[str, Any]:
        dim = head_dim_of(self.config)
        heads, kv_heads = (self.config.num_attention_heads, dim), (self.config.num_key_value_heads, dim)
        return {"qkv_proj": (heads, kv_heads, kv_heads)}

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        return layout.qkv(self.config.num_key_value_heads, module.qkv_proj)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return fused_mlp(module)

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window


def fused_mlp(mlp: Any) -> GatedMLP:
    return GatedMLP(linear_of(mlp.gate_up_proj), linear_of(mlp.down_proj), activation_of(mlp.activation_fn))
