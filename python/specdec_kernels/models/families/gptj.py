"""GPT-J and CodeGen: layer norms, attention and a feed-forward part without a gate side by side behind one of them, and
heads of which neighbours rotate in part. GPT-Neo: these one behind the other, positions that are added to embeddings,
scores without a scale, and windows in every second layer."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.attention import Attention, Heads, Projection, Rotation
from ..layers.linear import FeedForward, Layer, LayerNorm, ParallelLayer, PlainFeedForward, layer_norm_of, product_of
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

    def heads(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> Heads:
        sines, cosines = rotary.to(device, torch.float32).chunk(2, -1)
        return Heads(head_dim_of(self.config), Rotation(cosines, sines, interleaved=True))

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return ParallelLayer(
            input_norm=self.norm(module.ln_1),
            attention=self.attention(index, module.attn, heads),
            middle_norm=None,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        return Attention(
            qkv=self.qkv(module, heads),
            out=heads.out(module.out_proj),
            rotations=heads.rotations,
            kv_heads=self.config.num_attention_heads,
            head_dim=heads.size,
            scale=module.head_dim**-0.5,
        )

    def qkv(self, module: Any, heads: Heads) -> Projection:
        return heads.qkv(self.config.num_attention_heads, module.q_proj, module.k_proj, module.v_proj)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return PlainFeedForward(product_of(module.fc_in), product_of(module.fc_out), module.act)


@register
class CodeGen(GptJ):
    model_type = "codegen"

    def qkv(self, module: Any, heads: Heads) -> Projection:
        """One product, whose rows stand as four machines had them: of each its queries', values' and keys' heads."""
        count, machines = self.config.num_attention_heads, 4
        each = count // machines
        places = [[(3 * (i // each) + part) * each + i % each for i in range(count)] for part in (0, 2, 1)]
        return heads.qkv(count, module.qkv_proj, order=[place for part in places for place in part])


@register
class GptNeo(GptJ):
    model_type = "gpt_neo"

    def window(self, index: int) -> int | None:
        window: int = self.config.window_size
        return window if self.config.attention_layers[index] == "local" else None

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        parts = super().decoder(model, max_len, device)
        places = model.get_decoder().wpe.weight.detach()
        return parts._replace(embedding=parts.embedding._replace(places=places))

    def rotation(self, index: int) -> str | None:
        return None

    def rotary(self, body: Any) -> Any:
        return None

    def heads(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> Heads:
        return Heads(head_dim_of(self.config), Rotation.none(device))

    def layer(self, index: int, module: Any, heads: Heads) -> Layer:
        return Layer(
            input_norm=self.norm(module.ln_1),
            attention=self.attention(index, module.attn, heads),
            middle_norm=self.norm(module.ln_2),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def attention(self, index: int, module: Any, heads: Heads) -> Attention:
        part = super().attention(index, module.attention, heads)
        part.window, part.scale = self.window(index), 1.0
        return part

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return PlainFeedForward(product_of(module.c_fc), product_of(module.c_proj), module.act)
