"""Jais 2: Arcee with LayerNorms."""

from __future__ import annotations

from typing import Any

from ..layers.norm import Norm, layer_norm_of
from .arcee import Arcee
from .base import register


@register
class Jais2(Arcee):
    model_type = "jais2"

    def norm(self, module: Any) -> Norm:
        return layer_norm_of(module)
