"""Cohere (Command R): attention and feed-forward part side by side, layer norms without bias, neighbours that rotate.

Cohere 2 (Command R7B, Command A) has sliding windows in most layers; the others do not rotate.
"""

from __future__ import annotations

from typing import Any

from ..attention import Heads
from ..layers import Head, Layer, LayerNorm, ParallelLayer
from .base import register
from .llama import Llama


@register
class Cohere(Llama):
    model_type = "cohere"
    interleaved = True

    def check(self, name: str = "model") -> None:
        super().check(name)
        if getattr(self.config, "use_qk_norm", False):
            raise ValueError(f"{name}: use_qk_norm is set, expected queries and keys without layer norms")

    def norm(self, module: Any) -> LayerNorm:
        return LayerNorm(module.weight.detach(), None, module.variance_epsilon)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return ParallelLayer(
            input_norm=self.norm(module.input_layernorm),
            attention=self.attention(index, module.self_attn, heads),
            middle_norm=None,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def head(self, linear: Any) -> Head:
        return super().head(linear)._replace(scale=self.config.logit_scale)


@register
class Cohere2(Cohere):
    model_type = "cohere2"

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window if self.config.layer_types[index] == "sliding_attention" else None

    def rotation(self, index: int) -> str | None:
        return None if self.window(index) is None else ""
