"""GPT-J: one LayerNorm before attention and an MLP in parallel, and rotation of neighbors in a part of each head."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer, ParallelLayer
from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection, linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.norm import LayerNorm, layer_norm_of
from ..layers.rope import Rope
from .base import head_dim_of, register
from .llama import Llama


@register
class GptJ(Llama):
    model_type = "gptj"
    last_norm_name = "ln_f"
    layers_name = "h"

    def rotary(self, body: Any) -> Any:
        """Return the table of each position's sines and cosines: of all layers since transformers 5.24, or of each."""
        return getattr(body, "rotary_emb", body.h[0].attn).embed_positions

    def head_layout(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> HeadLayout:
        sin, cos = rotary.to(device, torch.float32).chunk(2, -1)
        return HeadLayout(head_dim_of(self.config), Rope(cos, sin, interleaved=True))

    def division(self) -> dict[str, Any]:
        return {"k_proj": "heads", "v_proj": "heads"}

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return ParallelLayer(
            input_norm=self.norm(module.ln_1),
            mixer=self.attention(index, module.attn, layout),
            pre_feed_forward_norm=None,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        return Attention(
            qkv=self.qkv(module, layout),
            out=layout.out(module.out_proj),
            rotations=layout.rotations,
            kv_heads=self.config.num_attention_heads,
            head_dim=layout.size,
            scale=module.head_dim**-0.5,
        )

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        return layout.qkv(self.config.num_attention_heads, module.q_proj, module.k_proj, module.v_proj)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.fc_in), linear_of(module.fc_out), module.act)
