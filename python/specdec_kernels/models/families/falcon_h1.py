"""Falcon-H1: attention and Mamba 2 side by side in each layer, with a factor for each of their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer, TwoMixerLayer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import HeadLayout
from ..layers.linear import fused, linear_of
from ..layers.mlp import Activation, FeedForward, GatedMLP, activation_of
from ..layers.norm import Scale
from ..layers.recurrent import GatedRMSNorm, Mamba2
from ..state_cache import StateSpec
from .base import register
from .hybrid import Mamba2Hybrid


@dataclass(frozen=True)
class ScaledActivation:
    """An activation of a multiple of its input."""

    activation: Activation
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(x * self.factor)


@register
class FalconH1(Mamba2Hybrid):
    model_type = "falcon_h1"
    last_norm_name = "final_layernorm"

    def state_specs(self, dtype: torch.dtype) -> list[StateSpec]:
        return [self.state_spec(dtype)] * self.config.num_hidden_layers

    @property
    def num_kv_layers(self) -> int:
        count: int = self.config.num_hidden_layers
        return count

    def embedding(self, module: Any) -> Embedding:
        return super().embedding(module)._replace(scale=self.config.embedding_multiplier)

    def head(self, linear: Any) -> LMHead:
        return super().head(linear)._replace(scale=self.config.lm_head_multiplier)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        config = self.config
        return TwoMixerLayer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            second=self.mamba(module.mamba),
            in_scales=(config.attention_in_multiplier, config.ssm_in_multiplier),
            out_scales=(config.attention_out_multiplier, config.ssm_out_multiplier),
            pre_feed_forward_norm=self.norm(module.pre_ff_layernorm),
            feed_forward=self.feed_forward(index, module.feed_forward),
            post_feed_forward_norm=Scale(config.mlp_multipliers[1]),
        )

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        part = super().attention(index, module, layout)
        return replace(part, scale=module.scaling * self.config.key_multiplier)

    def gated_norm(self, module: Any) -> GatedRMSNorm:
        if not self.config.mamba_rms_norm:
            return GatedRMSNorm(None)
        return super().gated_norm(module)._replace(gates_first=not self.config.mamba_norm_before_gate)

    def mamba(self, module: Any) -> Mamba2:
        sizes, weight = self.mamba_sizes, module.conv1d.weight
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        parts = values, values, keys, keys, sizes.value_heads
        factors = [weight.new_full((n,), each) for n, each in zip(parts, self.config.ssm_multipliers, strict=True)]
        return replace(super().mamba(module), factors=torch.cat(factors).detach())

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        factor = self.config.mlp_multipliers[0]
        activation = activation_of(module.act_fn) if factor == 1.0 else ScaledActivation(module.act_fn, factor)
        return GatedMLP(fused(module.gate_proj, module.up_proj), linear_of(module.down_proj), activation)
