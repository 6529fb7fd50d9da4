"""OLMo 3: OLMo 2 with sliding windows in most layers, which have their own rotation."""

from __future__ import annotations

from .base import register, window_of
from .olmo2 import Olmo2


@register
class Olmo3(Olmo2):
    model_type = "olmo3"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str:
        kind: str = self.config.layer_types[index]
        return kind
