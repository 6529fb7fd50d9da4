"""ERNIE 4.5: Llama with rotation of neighboring elements."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class Ernie45(Llama):
    model_type = "ernie4_5"
    interleaved = True
