"""Arcee (AFM): Llama with an MLP without a gate, of squared ReLU."""

from __future__ import annotations

from typing import Any

from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from .base import register
from .llama import Llama


@register
class Arcee(Llama):
    model_type = "arcee"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.up_proj), linear_of(module.down_proj), module.act_fn)
