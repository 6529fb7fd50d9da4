"""Kimi-Linear: Kimi delta attention in most layers, latent attention without rotation in the others, and experts."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.head_layout import HeadLayout
from ..layers.mixer import Mixer
from ..layers.recurrent import KimiDeltaAttention
from ..state_cache import ConvSpec, RecurrenceSpec, StateSpec
from .base import register
from .deepseek_v3 import DeepseekV3
from .hybrid import Hybrid


@register
class KimiLinear(DeepseekV3, Hybrid):
    model_type = "kimi_linear"

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        heads, dim = self.config.linear_num_heads, self.config.linear_head_dim
        sizes = RecurrenceSpec(heads, heads, dim, dim, decays_by_channel=True)
        return StateSpec(ConvSpec(3 * heads * dim, self.config.linear_conv_kernel_dim, dtype), sizes)

    def division(self) -> dict[str, Any]:
        each = ("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "forget_gate.f_b_proj")
        heads = self.config.linear_num_heads, self.config.linear_head_dim
        return {
            **{f"self_attn.{name}": "colwise" for name in each},
            "self_attn.conv1d": (heads, heads, heads),
            "forget_gate.A_log": "colwise",
            "forget_gate.dt_bias": "colwise",
        }

    def rotary(self, body: Any) -> None:
        """Return None: nothing is rotated."""

    def rotation(self, index: int) -> None:
        """Return None: nothing is rotated."""

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        if self.types[index] == "linear_attention":
            return KimiDeltaAttention.of(module.self_attn)
        return super().mixer(index, module, layout)
