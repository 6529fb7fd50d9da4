"""Ministral, CWM: Mistral with a sliding window in some layers. Ministral 3: Mistral whose queries grow by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from .base import register, window_of
from .mistral import Mistral


@register
class Ministral(Mistral):
    model_type = "ministral"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)


@register
class Cwm(Ministral):
    model_type = "cwm"


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
