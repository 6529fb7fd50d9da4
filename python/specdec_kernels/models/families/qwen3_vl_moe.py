"""The language model of Qwen3-VL with experts: Qwen3-MoE without windows."""

from __future__ import annotations

from .base import register
from .qwen3_moe import Qwen3Moe


@register
class Qwen3VlMoe(Qwen3Moe):
    model_type = "qwen3_vl_moe_text"

    def window(self, index: int) -> int | None:
        return None
