"""Arcee (AFM): Llama with a feed-forward part without a gate, of squared ReLU. Jais 2 has layer norms besides; Nemotron
has them too, which multiply by 1 + weight, and rotates the first numbers of each head alone."""

from __future__ import annotations

from typing import Any

from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.norm import Norm, layer_norm_of
from .base import register
from .llama import Llama


@register
class Arcee(Llama):
    model_type = "arcee"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.up_proj), linear_of(module.down_proj), module.act_fn)


@register
class Nemotron(Arcee):
    model_type = "nemotron"

    def norm(self, module: Any) -> Norm:
        return layer_norm_of(module)._replace(weight=module.weight.detach() + 1)


@register
class Jais2(Arcee):
    model_type = "jais2"

    def norm(self, module: Any) -> Norm:
        return layer_norm_of(module)
