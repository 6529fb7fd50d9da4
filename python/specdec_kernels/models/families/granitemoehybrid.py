"""Granite 4: Granite with Mamba 2 in most layers, experts or a dense MLP, and attention mostly without rotation."""

from __future__ import annotations

from typing import Any

from ..layers.head_layout import HeadLayout
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward
from .base import register
from .granitemoe import GraniteMoe, fused_mlp
from .hybrid import Mamba2Hybrid


@register
class GraniteMoeHybrid(GraniteMoe, Mamba2Hybrid):
    model_type = "granitemoehybrid"

    def rotation(self, index: int) -> str | None:
        return "" if self.config.position_embedding_type == "rope" else None

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        if module.mamba is not None:
            return self.mamba(module.mamba)
        return self.attention(index, module.self_attn, layout)

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if module.block_sparse_moe is None:
            return fused_mlp(module.shared_mlp)
        return super().feed_forward(index, module)
