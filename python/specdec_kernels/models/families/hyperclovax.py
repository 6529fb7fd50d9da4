"""HyperCLOVA X: Granite that multiplies logits where Granite divides them, and may have norms after its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.embedding import LMHead
from ..layers.head_layout import HeadLayout
from .base import register
from .granite import Granite


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
