"""MiniCPM3: latent attention, with factors of embeddings, logits, and of what each part adds to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import HeadLayout
from ..layers.norm import Scale
from .base import register
from .latent import Latent


@register
class MiniCPM3(Latent):
    model_type = "minicpm3"

    @property
    def rotates_neighbors(self) -> bool:
        return False

    def embedding(self, module: Any) -> Embedding:
        return super().embedding(module)._replace(scale=self.config.scale_emb)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        scale = Scale(module.residual_scale)
        return replace(super().layer(index, module, layout), post_attention_norm=scale, post_feed_forward_norm=scale)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(scale=1 / self.config.logits_scaling)
