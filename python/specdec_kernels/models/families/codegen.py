"""CodeGen: GPT-J with one projection of queries, keys and values, ordered as four machines trained it."""

from __future__ import annotations

from typing import Any

from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection
from .base import register
from .gptj import GptJ


@register
class CodeGen(GptJ):
    model_type = "codegen"

    def division(self) -> dict[str, Any]:
        raise ValueError(
            f"model: {self.model_type} is not divided among ranks (its projection is ordered by four machines)"
        )

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        """Return the projection, whose rows are stored by machine: each one's query, value and key heads."""
        count, machines = self.config.num_attention_heads, 4
        each = count // machines
        heads = [[(3 * (i // each) + part) * each + i % each for i in range(count)] for part in (0, 2, 1)]
        return layout.qkv(count, module.qkv_proj, order=[head for part in heads for head in part])
