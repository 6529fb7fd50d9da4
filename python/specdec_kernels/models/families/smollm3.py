"""SmolLM3: Llama in which some layers do not rotate, and some may have a sliding window."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class SmolLM3(Llama):
    model_type = "smollm3"

    def window(self, index: int) -> int | None:
        if not self.config.use_sliding_window or self.config.layer_types[index] != "sliding_attention":
            return None
        window: int | None = self.config.sliding_window
        return window

    def rotation(self, index: int) -> str | None:
        return "" if self.config.no_rope_layers[index] else None
