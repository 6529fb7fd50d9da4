"""GPT-NeoX (Pythia): layer norms, biases, one projection of queries, keys and values, heads that rotate in part, and a
feed-forward part without a gate, beside attention or behind it."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Attention, Heads, order_of_groups
from ..layers.linear import FeedForward, Layer, LayerNorm, ParallelLayer, PlainFeedForward, layer_norm_of, product_of
from .base import register
from .llama import Llama


@register
class GptNeoX(Llama):
    model_type = "gpt_neox"
    last_norm_name = "final_layer_norm"

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        kind = ParallelLayer if self.config.use_parallel_residual else Layer
        return kind(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.attention, heads),
            middle_norm=self.norm(module.post_attention_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        kv_heads = self.config.num_attention_heads
        return Attention(
            qkv=heads.qkv(kv_heads, module.query_key_value, order=order_of_groups(kv_heads, kv_heads)),
            out=heads.out(module.dense),
            rotations=heads.rotations,
            kv_heads=kv_heads,
            head_dim=heads.size,
            scale=module.scaling,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return PlainFeedForward(product_of(module.dense_h_to_4h), product_of(module.dense_4h_to_h), module.act)
