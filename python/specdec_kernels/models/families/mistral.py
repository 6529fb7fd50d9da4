"""Mistral: Llama with one sliding window for all layers, if any."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class Mistral(Llama):
    model_type = "mistral"

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window
