"""GPT-NeoX (Pythia): LayerNorms, biases, one projection of queries, keys and values, and an MLP without a gate.

A part of each head is rotated. The MLP is parallel to attention or after it.
"""

from __future__ import annotations

from typing import Any

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer, ParallelLayer
from ..layers.head_layout import HeadLayout, grouped_qkv_order
from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.norm import LayerNorm, layer_norm_of
from .base import register
from .llama import Llama


@register
class GptNeoX(Llama):
    model_type = "gpt_neox"
    last_norm_name = "final_layer_norm"

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        kind = ParallelLayer if self.config.use_parallel_residual else Layer
        return kind(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.attention, layout),
            pre_feed_forward_norm=self.norm(module.post_attention_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        kv_heads = self.config.num_attention_heads
        return Attention(
            qkv=layout.qkv(kv_heads, module.query_key_value, order=grouped_qkv_order(kv_heads, kv_heads)),
            out=layout.out(module.dense),
            rotations=layout.rotations,
            kv_heads=kv_heads,
            head_dim=layout.size,
            scale=module.scaling,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.dense_h_to_4h), linear_of(module.dense_4h_to_h), module.act)
