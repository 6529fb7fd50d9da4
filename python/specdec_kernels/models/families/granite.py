"""Granite: Llama with factors of embeddings, scores, logits, and of what each part adds to the residual stream.
HyperCLOVA X multiplies logits where Granite divides them, and may have norms behind its parts too."""

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


@register
class HyperClovaX(Granite):
    model_type = "hyperclovax"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        plain = super().layer(index, module, layout)
        if not self.config.use_post_norm:
            return plain
        factor = self.config.residual_multiplier
        norms = [self.norm(norm) for norm in (module.post_norm1, module.post_norm2)]
        post_attention_norm, post_feed_forward_norm = (norm._replace(weight=norm.weight * factor) for norm in norms)
        return replace(plain, post_attention_norm=post_attention_norm, post_feed_forward_norm=post_feed_forward_norm)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(scale=self.config.logits_scaling)
