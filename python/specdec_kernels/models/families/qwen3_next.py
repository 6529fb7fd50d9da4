"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts and norms of 1 + weight."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout, reordered
from ..layers.linear import Projection, Projections, SeparateProjections, SplitProjection, concatenated, linear_of
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward
from ..layers.norm import RMSNorm, gemma_rms_norm_of
from ..layers.quantized import QuantizedLinear
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
        projections = module.q_proj, module.k_proj, module.v_proj
        return Attention(
            qkv=layout.qkv(kv_heads, *projections, order=[*queries, *others], gates=gates),
            out=layout.out(module.o_proj),
            rotations=layout.rotations,
            kv_heads=kv_heads,
            head_dim=layout.size,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=module.scaling,
            num_gates=heads,
        )

    def delta_net(self, module: Any) -> GatedDeltaNet:
        return GatedDeltaNet(
            conv=Conv.of(module.conv1d, "silu"),
            out=linear_of(module.out_proj),
            in_proj=self.in_proj(module),
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

    @property
    def in_proj_sizes(self) -> tuple[int, int, int, int]:
        """Outputs of the projections of a delta net, as `GatedDeltaNet.in_proj` has them."""
        sizes = self.delta_sizes
        values = sizes.value_heads * sizes.value_dim
        return 2 * sizes.key_heads * sizes.key_dim + values, values, sizes.value_heads, sizes.value_heads

    def in_proj(self, module: Any) -> Projections:
        """Return the projections of a delta net, which the module has key head by key head."""
        sizes, linears = self.delta_sizes, (module.in_proj_qkvz, module.in_proj_ba)
        each = sizes.value_heads // sizes.key_heads
        values = each * sizes.value_dim
        orders = [by_part(parts, sizes.key_heads) for parts in ([sizes.key_dim] * 2 + [values] * 2, [each] * 2)]
        if any(isinstance(linear, QuantizedLinear) for linear in linears):
            device = module.A_log.device
            rows, gates = (reordered(linear, order, device) for linear, order in zip(linears, orders, strict=True))
            return separate(rows, gates, self.in_proj_sizes)
        order = [*orders[0], *(len(orders[0]) + i for i in orders[1])]
        return SplitProjection(concatenated(*linears).permute_outputs(order), self.in_proj_sizes)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return shared_moe(module)


def separate(rows: Projection, gates: Projection, sizes: tuple[int, int, int, int]) -> Projections:
    """Return the projections of a delta net: two outputs of `rows` and two of `gates`."""
    return SeparateProjections((SplitProjection(rows, sizes[:2]), SplitProjection(gates, sizes[2:])))


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
