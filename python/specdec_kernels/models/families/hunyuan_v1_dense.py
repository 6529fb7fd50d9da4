"""Hunyuan: Llama with norms of query and key heads after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.norm import RMSNorm
from .base import register
from .llama import Llama


@register
class HunYuanDense(Llama):
    model_type = "hunyuan_v1_dense"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        # A rotation keeps mean squares, so that heads may be normalized before it, except for the weights: those of
        # queries and keys meet in the scores, element by element, and both multiply rotated queries. Cosines and sines
        # scaled by a factor (YaRN) leave the norm after them unchanged, up to eps.
        q_weight, k_weight = module.query_layernorm.weight.detach(), module.key_layernorm.weight.detach()
        square = layout.rotations[0, 0] ** 2
        plain_norm = RMSNorm(torch.ones_like(q_weight), module.query_layernorm.variance_epsilon / square.item())
        norm = layout.norm(plain_norm)
        factors = layout.permute(q_weight.float() * k_weight.float() / square)
        return replace(
            super().attention(index, module, layout),
            q_norm=norm,
            k_norm=norm,
            q_factors=factors[None].to(q_weight.dtype),
        )
