"""Falcon: layer norms, attention and feed-forward part side by side, one projection of queries, keys and values, of
which all queries or groups of them share a key; norms of each part or of both."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Attention, Heads, order_of_groups
from ..layers.linear import FeedForward, Layer, LayerNorm, ParallelLayer, PlainFeedForward, layer_norm_of, product_of
from .base import register
from .llama import Llama


@register
class Falcon(Llama):
    model_type = "falcon"
    last_norm_name = "ln_f"
    layers_name = "h"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if self.config.alibi:
            raise ValueError(f"{name}: alibi is True, expected False (scores that fall with the distance)")

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        both = self.config.new_decoder_architecture and self.config.num_ln_in_parallel_attn == 2
        is_parallel = self.config.parallel_attn or self.config.new_decoder_architecture
        if both:
            middle: LayerNorm | None = self.norm(module.ln_mlp)
        else:
            middle = None if is_parallel else self.norm(module.post_attention_layernorm)
        kind = ParallelLayer if is_parallel else Layer
        return kind(
            input_norm=self.norm(module.ln_attn if both else module.input_layernorm),
            attention=self.attention(index, module.self_attention, heads),
            middle_norm=middle,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        kv_heads = module.num_kv_heads
        order = order_of_groups(self.config.num_attention_heads, kv_heads)
        return Attention(
            qkv=heads.qkv(kv_heads, module.query_key_value, order=order),
            out=heads.out(module.dense),
            rotations=heads.rotations,
            kv_heads=kv_heads,
            head_dim=heads.size,
            scale=module.head_dim**-0.5,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return PlainFeedForward(product_of(module.dense_h_to_4h), product_of(module.dense_4h_to_h), module.act)
