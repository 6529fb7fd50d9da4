"""SmolLM3: Llama in which some layers do not rotate, and some may have a sliding window."""

from __future__ import annotations

from .base import register, window_of
from .llama import Llama


@register
class SmolLM3(Llama):
    model_type = "smollm3"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index) if self.config.use_sliding_window else None

    def rotation(self, index: int) -> str | None:
        return "" if self.config.no_rope_layers[index] else None
