"""Nemotron: Arcee with LayerNorms that multiply by 1 + weight, and rotation of the first elements of each head."""

from __future__ import annotations

from typing import Any

from ..layers.norm import Norm, layer_norm_of
from .arcee import Arcee
from .base import register


@register
class Nemotron(Arcee):
    model_type = "nemotron"

    def norm(self, module: Any) -> Norm:
        return layer_norm_of(module)._replace(weight=module.weight.detach() + 1)
