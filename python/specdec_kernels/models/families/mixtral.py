"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.linear import FeedForward
from ..layers.moe import ExpertFeedForward
from .base import register
from .mistral import Mistral
from .qwen3_moe import experts_of, softmax_router


@register
class Mixtral(Mistral):
    model_type = "mixtral"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return ExpertFeedForward(softmax_router(module.gate, normalised=True), experts_of(module.experts))
