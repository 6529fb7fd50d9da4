"""Phi-3 and Phi-4: Llama whose checkpoints have one projection of queries, keys and values, and one of gate and up."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import FeedForward, GatedFeedForward, activation_of, product_of
from .base import register
from .llama import Llama


@register
class Phi3(Llama):
    model_type = "phi3"

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        kv_heads = self.config.num_key_value_heads
        return Attention(
            qkv=heads.qkv(kv_heads, module.qkv_proj),
            out=heads.out(module.o_proj),
            rotations=heads.rotations,
            kv_heads=kv_heads,
            head_dim=heads.size,
            window=self.window(index),
            scale=module.scaling,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return fused(module)

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window


def fused(mlp: Any) -> GatedFeedForward:
    return GatedFeedForward(product_of(mlp.gate_up_proj), product_of(mlp.down_proj), activation_of(mlp.activation_fn))
