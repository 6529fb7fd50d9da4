"""The language model of Qwen2-VL: Qwen2. A text token has the same position on all three axes."""

from __future__ import annotations

from .base import register
from .qwen2 import Qwen2


@register
class Qwen2Vl(Qwen2):
    model_type = "qwen2_vl_text"
