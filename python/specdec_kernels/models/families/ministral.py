"""Ministral: Mistral with a sliding window in some layers."""

from __future__ import annotations

from .base import register, window_of
from .mistral import Mistral


@register
class Ministral(Mistral):
    model_type = "ministral"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)
