"""LFM2: short convolutions in most layers, attention with norms of heads in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import fused, linear_of
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward, GatedMLP
from ..layers.norm import rms_norm_of
from ..layers.recurrent import Conv, ShortConv
from ..state_cache import ConvSpec, StateSpec
from .base import register
from .hybrid import Hybrid


@register
class Lfm2(Hybrid):
    model_type = "lfm2"
    out_name = "out_proj"
    last_norm_name = "embedding_norm"

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        return StateSpec(ConvSpec(self.config.hidden_size, self.config.conv_L_cache, dtype))

    def division(self) -> dict[str, Any]:
        """Divide attention and MLPs; convolutions, which have no heads, stay whole."""
        mlp = {
            f"feed_forward.{name}": style for name, style in (("w1", "colwise"), ("w3", "colwise"), ("w2", "rowwise"))
        }
        return {"self_attn.out_proj": "rowwise", **mlp}

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.operator_norm),
            mixer=self.mixer(index, module, layout),
            pre_feed_forward_norm=self.norm(module.ffn_norm),
            feed_forward=self.feed_forward(index, module.feed_forward),
        )

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        if hasattr(module, "conv"):
            conv = module.conv
            return ShortConv(conv=Conv.of(conv.conv), out=linear_of(conv.out_proj), in_proj=linear_of(conv.in_proj))
        return self.attention(index, module.self_attn, layout)

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        q_norm, k_norm = (layout.norm(rms_norm_of(norm)) for norm in (module.q_layernorm, module.k_layernorm))
        return replace(super().attention(index, module, layout), q_norm=q_norm, k_norm=k_norm)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return GatedMLP(fused(module.w1, module.w3), linear_of(module.w2))
