"""Gemma: Llama with GELU, norms that multiply by 1 + weight, and scaled embeddings."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.embedding import Embedding
from ..layers.norm import RMSNorm, gemma_rms_norm_of
from .base import register
from .llama import Llama


@register
class Gemma(Llama):
    model_type = "gemma"

    def check(self, name: str = "model") -> None:
        super().check(name)
        if getattr(self.config, "use_bidirectional_attention", None):
            raise ValueError(f"{name}: use_bidirectional_attention is set, expected causal attention")

    def embedding(self, module: Any) -> Embedding:
        weight = module.weight.detach()  # the scale is rounded to its dtype, as in training
        return Embedding(weight, torch.tensor(self.config.hidden_size**0.5, dtype=weight.dtype).item())

    def norm(self, module: Any) -> RMSNorm:
        return gemma_rms_norm_of(module)
