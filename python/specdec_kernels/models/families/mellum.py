"""Mellum: Qwen3-MoE with a sliding window in some layers, which have their own rotation."""

from __future__ import annotations

from .base import register, window_of
from .qwen3_moe import Qwen3Moe


@register
class Mellum(Qwen3Moe):
    model_type = "mellum"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str:
        kind: str = self.config.layer_types[index]
        return kind
