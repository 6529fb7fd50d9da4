"""AFMoE (Arcee Trinity): Qwen3 with gates of what heads attend to, norms behind its parts too, a sliding window in most
layers, of which the others do not rotate, and experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import Embedding, FeedForward, Layer
from ..layers.moe import ExpertFeedForward, SigmoidRouter
from .base import register
from .llama import gated
from .qwen3 import Qwen3
from .qwen3_moe import experts_of


@register
class Afmoe(Qwen3):
    model_type = "afmoe"

    def embedding(self, module: Any) -> Embedding:
        scale = self.config.hidden_size**0.5 if self.config.mup_enabled else None
        return super().embedding(module)._replace(scale=scale)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            behind_attention=self.norm(module.post_attention_layernorm),
            middle_norm=self.norm(module.pre_mlp_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
            behind_feed_forward=self.norm(module.post_mlp_layernorm),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        return replace(super().attention(index, module, heads), gate=heads.gate(module.gate_proj))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated(module)
        router = SigmoidRouter(
            weight=module.router.gate.weight.detach(),
            correction=module.expert_bias.detach(),
            taken=module.router.top_k,
            groups=1,
            groups_taken=1,
            normalised=True,
            factor=module.router.route_scale,
        )
        return ExpertFeedForward(router, experts_of(module.experts), gated(module.shared_experts))

    def rotation(self, index: int) -> str | None:
        return None if self.window(index) is None else ""
