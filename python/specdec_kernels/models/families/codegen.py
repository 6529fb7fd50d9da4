"""CodeGen: GPT-J with one projection of queries, keys and values, ordered as four machines trained it."""

from __future__ import annotations

from typing import Any

from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection
from .base import head_dim_of, register
from .gptj import GptJ


@register
class CodeGen(GptJ):
    model_type = "codegen"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if self.config.num_attention_heads % self.heads_of_machine:
            raise ValueError(f"{name}: {self.model_type} is divided among ranks by its four machines, expected 2 or 4")

    def division(self) -> dict[str, Any]:
        return {"qkv_proj": "colwise"}

    @property
    def heads_of_machine(self) -> int:
        """Return the heads next to each other in the projection, also of a rank, which has whole machines."""
        heads: int = self.config.hidden_size // head_dim_of(self.config) // 4
        return heads

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        """Return the projection, whose rows are stored by machine: each one's query, value and key heads."""
        count, each = self.config.num_attention_heads, self.heads_of_machine
        heads = [[(3 * (i // each) + part) * each + i % each for i in range(count)] for part in (0, 2, 1)]
        return layout.qkv(count, module.qkv_proj, order=[head for part in heads for head in part])
