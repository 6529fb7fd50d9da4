"""Granite: Llama with factors of embeddings, scores, logits, and of what each part adds to the residual stream.
HyperCLOVA X multiplies logits where Granite divides them, and may have norms behind its parts too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Heads
from ..layers.linear import Embedding, Head, Layer, Norm, Scale, norm_of
from .base import register
from .llama import Llama


@register
class Granite(Llama):
    model_type = "granite"

    def norm(self, module: Any) -> Norm:
        return norm_of(module)

    def embedding(self, module: Any) -> Embedding:
        return super().embedding(module)._replace(scale=self.config.embedding_multiplier)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        scale = Scale(self.config.residual_multiplier)
        return replace(super().layer(index, module, heads), behind_attention=scale, behind_feed_forward=scale)

    def head(self, linear: Any) -> Head:
        return super().head(linear)._replace(scale=1 / self.config.logits_scaling)


@register
class HyperClovaX(Granite):
    model_type = "hyperclovax"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        plain = super().layer(index, module, heads)
        if not self.config.use_post_norm:
            return plain
        factor = self.config.residual_multiplier
        norms = [self.norm(norm) for norm in (module.post_norm1, module.post_norm2)]
        behind_attention, behind_feed_forward = (norm._replace(weight=norm.weight * factor) for norm in norms)
        return replace(plain, behind_attention=behind_attention, behind_feed_forward=behind_feed_forward)

    def head(self, linear: Any) -> Head:
        return super().head(linear)._replace(scale=self.config.logits_scaling)
