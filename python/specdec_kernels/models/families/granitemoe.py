"""Granite with experts in all layers."""

from __future__ import annotations

from typing import Any

from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import FeedForward, GatedMLP, activation_of
from ..layers.moe import MoE
from ..layers.norm import Scale
from .base import register
from .granite import Granite
from .qwen3_moe import experts_of, softmax_router


@register
class GraniteMoe(Granite):
    model_type = "granitemoe"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        scale = Scale(self.config.residual_multiplier)
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.mixer(index, module, layout),
            post_attention_norm=scale,
            pre_feed_forward_norm=self.norm(module.post_attention_layernorm),
            feed_forward=self.feed_forward(index, module),
            post_feed_forward_norm=scale,
        )

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        """Return the MoE of a layer's module, which holds routed and shared experts."""
        routed, shared = module.block_sparse_moe, getattr(module, "shared_mlp", None)
        return MoE(
            softmax_router(routed.router, norm_topk_prob=True),
            experts_of(routed.experts),
            None if shared is None else fused_mlp(shared),
        )


def fused_mlp(mlp: Any) -> GatedMLP:
    return GatedMLP(linear_of(mlp.input_linear), linear_of(mlp.output_linear), activation_of(mlp.activation))
