"""SmolLM3: Llama in which some layers do not rotate, and some may have a sliding window."""

from __future__ import annotations

from .base import register, window_of
from .llama import Llama


@register
class SmolLM3(Llama):
    model_type = "smollm3"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if not self.config.use_sliding_window and "sliding_attention" in self.config.layer_types:
            # Whether there is a window depends on the attention that transformers runs.
            raise ValueError(
                f"{name}: use_sliding_window is False next to layer_types with 'sliding_attention', expected True or "
                "'full_attention' alone"
            )

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str | None:
        return "" if self.config.no_rope_layers[index] else None
