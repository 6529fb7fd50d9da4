"""Qwen2 and 2.5: Llama with biases of queries, keys and values, and sliding windows in some layers."""

from __future__ import annotations

from .base import register, window_of
from .llama import Llama


@register
class Qwen2(Llama):
    model_type = "qwen2"

    def window(self, index: int) -> int | None:
        # transformers derives the layers with a window from `max_window_layers` where the config does not list them,
        # and sets the window to None without `use_sliding_window`.
        return window_of(self.config, index)
