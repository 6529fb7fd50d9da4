"""GLM: Llama that rotates neighbors, in the first elements of each head alone, with one projection for gate and up."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from .base import register
from .llama import Llama
from .phi3 import fused_mlp


@register
class Glm(Llama):
    model_type = "glm"
    interleaved = True

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return fused_mlp(module)
