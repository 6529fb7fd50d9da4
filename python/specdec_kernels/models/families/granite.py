"""Granite: Llama with factors of embeddings, scores, logits, and of what each part adds to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention import Heads
from ..layers import Embedding, Head, Layer, Scale
from .base import register
from .llama import Llama


@register
class Granite(Llama):
    model_type = "granite"

    def embedding(self, module: Any) -> Embedding:
        return super().embedding(module)._replace(scale=self.config.embedding_multiplier)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        scale = Scale(self.config.residual_multiplier)
        return replace(super().layer(index, module, heads), behind_attention=scale, behind_feed_forward=scale)

    def head(self, linear: Any) -> Head:
        return super().head(linear)._replace(scale=1 / self.config.logits_scaling)
