"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts and norms of 1 + weight."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout, reordered
from ..layers.linear import Projection, linear_of
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward
from ..layers.norm import RMSNorm, gemma_rms_norm_of
from ..layers.recurrent import Conv, GatedDeltaNet, GatedRMSNorm
from ..state_cache import ConvSpec, RecurrenceSpec, StateSpec
from .base import register
from .hybrid import Hybrid
from .qwen2_moe import shared_moe


@register
class Qwen3Next(Hybrid):
    model_type = "qwen3_next"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if self.config.hidden_act != "silu":
            raise ValueError(f"{name}: hidden_act is {self.config.hidden_act!r}, expected 'silu'")

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        sizes = self.delta_sizes
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
        return StateSpec(ConvSpec(channels, self.config.linear_conv_kernel_dim, dtype), sizes)

    def norm(self, module: Any) -> RMSNorm:
        return gemma_rms_norm_of(module)

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        if hasattr(module, "linear_attn"):
            return self.delta_net(module.linear_attn)
        return self.attention(index, module.self_attn, layout)

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        """Return the attention of a module whose `q_proj` has the query and then the gate of each head."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        queries, gates = list(range(0, 2 * heads, 2)), list(range(1, 2 * heads, 2))
        others = range(2 * heads, 2 * (heads + kv_heads))
        q_norm, k_norm = (layout.norm(self.norm(norm)) for norm in (module.q_norm, module.k_norm))
        return Attention(
            qkv=layout.qkv(kv_heads, module.q_proj, module.k_proj, module.v_proj, order=[*queries, *others]),
            out=layout.out(module.o_proj),
            rotations=layout.rotations,
            kv_heads=kv_heads,
            head_dim=layout.size,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=module.scaling,
            gate=layout.gate(module.q_proj, gates),
        )

    def delta_net(self, module: Any) -> GatedDeltaNet:
        return GatedDeltaNet(
            conv=Conv.of(module.conv1d, "silu"),
            out=linear_of(module.out_proj),
            in_proj=self.in_proj(module),
            gates_proj=self.gates_proj(module),
            decay=-module.A_log.detach().float().exp(),
            dt_bias=module.dt_bias.detach(),
            norm=GatedRMSNorm(module.norm.weight.detach(), module.norm.variance_epsilon),
            sizes=self.delta_sizes,
        )

    @property
    def delta_sizes(self) -> RecurrenceSpec:
        config = self.config
        return RecurrenceSpec(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )

    def division(self) -> dict[str, Any]:
        sizes = self.delta_sizes
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
        each = ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")
        return {
            **{f"linear_attn.{name}": "colwise" for name in each},
            "linear_attn.in_proj_qkv": (keys, keys, values),
            "linear_attn.conv1d": (keys, keys, values),
            "linear_attn.out_proj": "rowwise",
        }

    def in_proj(self, module: Any) -> Projection:
        """Return the projection of queries, keys, values and gates, which the module has key head by key head."""
        sizes = self.delta_sizes
        values = sizes.value_heads // sizes.key_heads * sizes.value_dim
        order = by_part([sizes.key_dim, sizes.key_dim, values, values], sizes.key_heads)
        return reordered(module.in_proj_qkvz, order, module.A_log.device)

    def gates_proj(self, module: Any) -> Projection:
        sizes = self.delta_sizes
        order = by_part([sizes.value_heads // sizes.key_heads] * 2, sizes.key_heads)
        return reordered(module.in_proj_ba, order, module.A_log.device)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return shared_moe(module)


def by_part(parts: list[int], groups: int) -> list[int]:
    """Return the order that puts equal parts of all groups next to each other, for groups that have all parts each."""
    size = sum(parts)
    begins = [sum(parts[:index]) for index in range(len(parts))]
    return [
        group * size + begin + i
        for begin, part in zip(begins, parts, strict=True)
        for group in range(groups)
        for i in range(part)
    ]
