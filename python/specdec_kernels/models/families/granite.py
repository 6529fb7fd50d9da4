"""Granite: Llama with factors of embeddings, scores, logits, and of what each part adds to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import HeadLayout
from ..layers.norm import RMSNorm, Scale, rms_norm_of
from .base import register
from .llama import Llama


@register
class Granite(Llama):
    model_type = "granite"

    def norm(self, module: Any) -> RMSNorm:
        return rms_norm_of(module)

    def embedding(self, module: Any) -> Embedding:
        return super().embedding(module)._replace(scale=self.config.embedding_multiplier)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        scale = Scale(self.config.residual_multiplier)
        return replace(super().layer(index, module, layout), post_attention_norm=scale, post_feed_forward_norm=scale)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(scale=1 / self.config.logits_scaling)
