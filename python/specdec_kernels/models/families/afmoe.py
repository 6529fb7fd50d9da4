"""AFMoE (Arcee Trinity): Qwen3 with gated attention, norms after its parts too, and experts after the first layers.

Most layers have a sliding window; the others do not rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding
from ..layers.head_layout import HeadLayout
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SigmoidRouter
from .base import register
from .llama import gated_mlp
from .qwen3 import Qwen3
from .qwen3_moe import experts_of


@register
class Afmoe(Qwen3):
    model_type = "afmoe"

    def embedding(self, module: Any) -> Embedding:
        scale = self.config.hidden_size**0.5 if self.config.mup_enabled else None
        return super().embedding(module)._replace(scale=scale)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            post_attention_norm=self.norm(module.post_attention_layernorm),
            pre_feed_forward_norm=self.norm(module.pre_mlp_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
            post_feed_forward_norm=self.norm(module.post_mlp_layernorm),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        return replace(super().attention(index, module, layout), gate=layout.gate(module.gate_proj))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated_mlp(module)
        router = SigmoidRouter(
            weight=module.router.gate.weight.detach(),
            e_score_correction_bias=module.expert_bias.detach(),
            top_k=module.router.top_k,
            routed_scaling_factor=module.router.route_scale,
        )
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_experts))

    def rotation(self, index: int) -> str | None:
        return None if self.window(index) is None else ""
