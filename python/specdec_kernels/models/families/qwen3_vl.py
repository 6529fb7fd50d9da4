"""The language model of Qwen3-VL: Qwen3 without windows.

What Qwen3-VL adds to hidden states (deepstack) comes from images.
"""

from __future__ import annotations

from .base import register
from .qwen3 import Qwen3


@register
class Qwen3Vl(Qwen3):
    model_type = "qwen3_vl_text"

    def window(self, index: int) -> int | None:
        return None
