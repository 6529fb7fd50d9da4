"""StableLM: Llama with LayerNorms and rotation of a part of each head; some have parallel layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..layers.attention import LayerNormedHeads
from ..layers.decoder_layer import Layer
from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection
from ..layers.norm import LayerNorm, layer_norm_of
from .base import register
from .llama import Llama


@register
class StableLm(Llama):
    model_type = "stablelm"

    def division(self) -> dict[str, Any]:
        if self.config.qk_layernorm:
            raise ValueError(f"model: {self.model_type} with qk_layernorm is not divided among ranks")
        return {}

    def norm(self, module: Any) -> LayerNorm:
        return layer_norm_of(module)

    def head_norms(self, module: Any) -> Callable[[Projection], Projection] | None:
        if not self.config.qk_layernorm:
            return None
        q_norm, k_norm = self.stacked_norm(module.q_layernorm), self.stacked_norm(module.k_layernorm)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return partial(LayerNormedHeads.of, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm)

    def stacked_norm(self, module: Any) -> LayerNorm:
        """Return the norms of all query or all key heads as one, with a weight for each head."""
        weight = torch.stack([norm.weight.detach() for norm in module.norms])
        return LayerNorm(weight, None, module.norms[0].eps)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        if not self.config.use_parallel_residual:
            return super().layer(index, module, layout)
        return self.parallel_layer(index, module, layout)
