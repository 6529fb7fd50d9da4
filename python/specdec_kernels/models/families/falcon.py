"""Falcon: parallel layers with LayerNorms, one for both parts or one each.

Queries, keys and values have one projection, and all queries or groups of them share a key.
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
class Falcon(Llama):
    model_type = "falcon"
    last_norm_name = "ln_f"
    layers_name = "h"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if self.config.alibi:
            raise ValueError(f"{name}: alibi is True, expected False (scores that fall with the distance)")

    def division(self) -> dict[str, Any]:
        raise ValueError(
            f"model: {self.model_type} is not divided among ranks (its projections share keys in several layouts)"
        )

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        both = self.config.new_decoder_architecture and self.config.num_ln_in_parallel_attn == 2
        is_parallel = self.config.parallel_attn or self.config.new_decoder_architecture
        if both:
            middle: LayerNorm | None = self.norm(module.ln_mlp)
        else:
            middle = None if is_parallel else self.norm(module.post_attention_layernorm)
        kind = ParallelLayer if is_parallel else Layer
        return kind(
            input_norm=self.norm(module.ln_attn if both else module.input_layernorm),
            mixer=self.attention(index, module.self_attention, layout),
            pre_feed_forward_norm=middle,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        kv_heads = module.num_kv_heads
        order = grouped_qkv_order(self.config.num_attention_heads, kv_heads)
        return Attention(
            qkv=layout.qkv(kv_heads, module.query_key_value, order=order),
            out=layout.out(module.dense),
            rotations=layout.rotations,
            kv_heads=kv_heads,
            head_dim=layout.size,
            scale=module.head_dim**-0.5,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.dense_h_to_4h), linear_of(module.dense_4h_to_h), module.act)
