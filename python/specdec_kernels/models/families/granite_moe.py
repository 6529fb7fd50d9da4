"""Granite with experts in all layers, and beside them one that all rows take, if any."""

from __future__ import annotations

from typing import Any

from ..layers.attention import Heads
from ..layers.linear import FeedForward, GatedFeedForward, Layer, Scale, activation_of, product_of
from ..layers.moe import ExpertFeedForward
from .base import register
from .granite import Granite
from .qwen3_moe import experts_of, softmax_router


@register
class GraniteMoe(Granite):
    model_type = "granitemoe"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        scale = Scale(self.config.residual_multiplier)
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            behind_attention=scale,
            middle_norm=self.norm(module.post_attention_layernorm),
            feed_forward=self.feed_forward(index, module),
            behind_feed_forward=scale,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        """Of a layer's module: what all rows take stands beside that of the experts."""
        routed, shared = module.block_sparse_moe, getattr(module, "shared_mlp", None)
        return ExpertFeedForward(
            softmax_router(routed.router, normalised=True),
            experts_of(routed.experts),
            None if shared is None else in_one(shared),
        )


@register
class GraniteMoeShared(GraniteMoe):
    model_type = "granitemoeshared"


def in_one(mlp: Any) -> GatedFeedForward:
    return GatedFeedForward(product_of(mlp.input_linear), product_of(mlp.output_linear), activation_of(mlp.activation))
