"""Gemma 2: Gemma with norms behind its parts too, soft caps, and a sliding window in every second layer. VaultGemma has
no norms behind its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.attention import Attention, Heads
from ..layers.linear import Head, Layer
from .base import register, window_of
from .gemma import Gemma


@register
class Gemma2(Gemma):
    model_type = "gemma2"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if getattr(self.config, "use_bidirectional_attention", None):
            raise ValueError(f"{name}: use_bidirectional_attention is set, expected causal attention")

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            behind_attention=self.norm(module.post_attention_layernorm),
            middle_norm=self.norm(module.pre_feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
            behind_feed_forward=self.norm(module.post_feedforward_layernorm),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        return replace(super().attention(index, module, heads), soft_cap=self.config.attn_logit_softcapping)

    def head(self, linear: Any) -> Head:
        return super().head(linear)._replace(soft_cap=self.config.final_logit_softcapping)

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)


@register
class VaultGemma(Gemma2):
    model_type = "vaultgemma"

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            middle_norm=self.norm(module.pre_feedforward_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )
