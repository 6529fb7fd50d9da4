"""GPT-Neo: LayerNorms, learned position embeddings, scores without a scale, and windows in every second layer."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.rope import Rope
from .base import Decoder, head_dim_of, register
from .gptj import GptJ


@register
class GptNeo(GptJ):
    model_type = "gpt_neo"

    def division(self) -> dict[str, Any]:
        own = {"attn.attention.out_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
        return super().division() | own

    def window(self, index: int) -> int | None:
        window: int = self.config.window_size
        return window if self.config.attention_layers[index] == "local" else None

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        parts = super().decoder(model, max_len, device)
        position_weight = model.get_decoder().wpe.weight.detach()
        return parts._replace(embedding=parts.embedding._replace(position_weight=position_weight))

    def rotation(self, index: int) -> str | None:
        return None

    def rotary(self, body: Any) -> Any:
        return None

    def head_layout(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> HeadLayout:
        return HeadLayout(head_dim_of(self.config), Rope.none(device))

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.ln_1),
            mixer=self.attention(index, module.attn, layout),
            pre_feed_forward_norm=self.norm(module.ln_2),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        part = super().attention(index, module.attention, layout)
        part.window, part.scale = self.window(index), 1.0
        return part

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.c_fc), linear_of(module.c_proj), module.act)
