"""OLMo 2: norms after the parts instead of before them, and norms over all query or key heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from ..layers.norm import NoNorm, rms_norm_of
from .base import register
from .llama import Llama
from .olmoe import RMSNormedQK


@register
class Olmo2(Llama):
    model_type = "olmo2"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        attention = self.attention(index, module.self_attn, layout)
        return post_norm_layer(module, attention, self.feed_forward(index, module.mlp))

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        q_norm, k_norm = (layout.norm(rms_norm_of(norm)) for norm in (module.q_norm, module.k_norm))
        return replace(plain, qkv=RMSNormedQK(plain.qkv, q_norm, k_norm))


def post_norm_layer(module: Any, mixer: Attention, feed_forward: FeedForward) -> Layer:
    """Return a layer with norms after its parts and none before them."""
    return Layer(
        input_norm=NoNorm(),
        mixer=mixer,
        post_attention_norm=rms_norm_of(module.post_attention_layernorm),
        pre_feed_forward_norm=NoNorm(),
        feed_forward=feed_forward,
        post_feed_forward_norm=rms_norm_of(module.post_feedforward_layernorm),
    )
