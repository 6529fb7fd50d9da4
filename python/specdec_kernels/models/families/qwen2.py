"""Qwen2 and 2.5: Llama with biases of queries, keys and values, and sliding windows in some layers."""

from __future__ import annotations

from .base import register, window_of
from .llama import Llama


@register
class Qwen2(Llama):
    model_type = "qwen2"

    def window(self, index: int) -> int | None:
        # Which layers slide follows from `max_window_layers` where the config does not say it; without
        # `use_sliding_window` transformers sets the window to None.
        return window_of(self.config, index)
