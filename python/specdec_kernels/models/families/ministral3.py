"""Ministral 3: Mistral whose queries are scaled by their position, as in Llama 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from .base import register
from .mistral import Mistral


@register
class Ministral3(Mistral):
    model_type = "ministral3"

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        plain = super().attention(index, module, layout)
        beta = self.config.rope_parameters.get("llama_4_scaling_beta")
        if not beta:
            return plain
        steps = torch.arange(len(layout.rotations), device=layout.rotations.device)
        steps = steps // self.config.rope_parameters["original_max_position_embeddings"]
        factors = 1 + beta * torch.log(1 + steps.float())
        return replace(plain, q_factors=factors[:, None].to(module.o_proj.weight.dtype))
