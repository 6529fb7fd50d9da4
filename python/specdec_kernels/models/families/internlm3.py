"""InternLM3: Llama under another name."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class InternLM3(Llama):
    model_type = "internlm3"
