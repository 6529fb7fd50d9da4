"""GPT-J and CodeGen: layer norms, attention and a feed-forward part without a gate side by side behind one of them, and
heads of which neighbours rotate in part. GPT-Neo: these one behind the other, positions that are added to embeddings,
scores without a scale, and windows in every second layer."""

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
from .base import Decoder, head_dim_of, register
from .llama import Llama


@register
class GptJ(Llama):
    model_type = "gptj"
    last_norm_name = "ln_f"
    layers_name = "h"

    def rotary(self, body: Any) -> Any:
        """Of each position the sines of its angles, then their cosines; each layer has them."""
        return body.h[0].attn.embed_positions

    def head_layout(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> HeadLayout:
        sines, cosines = rotary.to(device, torch.float32).chunk(2, -1)
        return HeadLayout(head_dim_of(self.config), Rope(cosines, sines, interleaved=True))

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return ParallelLayer(
            input_norm=self.norm(module.ln_1),
            attention=self.attention(index, module.attn, layout),
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


@register
class CodeGen(GptJ):
    model_type = "codegen"

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        """One product, whose rows stand as four machines had them: of each its queries', values' and keys' heads."""
        count, machines = self.config.num_attention_heads, 4
        each = count // machines
        places = [[(3 * (i // each) + part) * each + i % each for i in range(count)] for part in (0, 2, 1)]
        return layout.qkv(count, module.qkv_proj, order=[place for part in places for place in part])


@register
class GptNeo(GptJ):
    model_type = "gpt_neo"

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
            attention=self.attention(index, module.attn, layout),
            pre_feed_forward_norm=self.norm(module.ln_2),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        part = super().attention(index, module.attention, layout)
        part.window, part.scale = self.window(index), 1.0
        return part

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return MLP(linear_of(module.c_fc), linear_of(module.c_proj), module.act)
