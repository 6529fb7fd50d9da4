"""Cohere 2 (Command R7B, Command A): Cohere with sliding windows in most layers; the others do not rotate."""

from __future__ import annotations

from .base import register, window_of
from .cohere import Cohere


@register
class Cohere2(Cohere):
    model_type = "cohere2"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str | None:
        return None if self.window(index) is None else ""
