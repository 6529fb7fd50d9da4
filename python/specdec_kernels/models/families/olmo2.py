"""OLMo 2: parts that read the residual stream as it is and have norms behind them; norms of all query and key heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import FeedForward, Layer, NoNorm, norm_of
from .base import register
from .llama import Llama
from .olmoe import NormedProduct


@register
class Olmo2(Llama):
    model_type = "olmo2"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        attention = self.attention(index, module.self_attn, heads)
        return with_norms_behind(module, attention, self.feed_forward(index, module.mlp))

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        plain = super().attention(index, module, heads)
        q_norm, k_norm = (heads.norm(norm_of(norm)) for norm in (module.q_norm, module.k_norm))
        return replace(plain, qkv=NormedProduct(plain.qkv, q_norm, k_norm))


def with_norms_behind(module: Any, attention: Attention, feed_forward: FeedForward) -> Layer:
    """A layer that has no norms before its parts."""
    return Layer(
        input_norm=NoNorm(),
        attention=attention,
        behind_attention=norm_of(module.post_attention_layernorm),
        middle_norm=NoNorm(),
        feed_forward=feed_forward,
        behind_feed_forward=norm_of(module.post_feedforward_layernorm),
    )
