"""The language model of Qwen3.5 with experts."""

from __future__ import annotations

from .base import register
from .qwen3_5 import Qwen35


@register
class Qwen35Moe(Qwen35):
    model_type = "qwen3_5_moe_text"
