"""Cohere (Command R): parallel layers, LayerNorms without bias, and rotation of neighboring elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..layers.attention import LayerNormedHeads
from ..layers.decoder_layer import Layer
from ..layers.embedding import LMHead
from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection
from ..layers.norm import LayerNorm
from .base import register
from .llama import Llama


@register
class Cohere(Llama):
    model_type = "cohere"
    interleaved = True

    def norm(self, module: Any) -> LayerNorm:
        return LayerNorm(module.weight.detach(), None, module.variance_epsilon)

    def head_norms(self, module: Any) -> Callable[[Projection], Projection] | None:
        if not getattr(module, "use_qk_norm", False):
            return None
        q_norm, k_norm = self.norm(module.q_norm), self.norm(module.k_norm)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return partial(LayerNormedHeads.of, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return self.parallel_layer(index, module, layout)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(scale=self.config.logit_scale)
