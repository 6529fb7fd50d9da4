"""Helium: Llama with rotation of neighboring elements."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class Helium(Llama):
    model_type = "helium"
    interleaved = True
