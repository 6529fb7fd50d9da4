"""The embedding of a model and its LM head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .divided_logits import DividedLogits
from .linear import Linear

SMALL_INDEX = 16  # up to that many tokens, torch's embedding has a kernel of its own


class Embedding(NamedTuple):
    """Token embeddings, optionally scaled, plus learned position embeddings where the model has them."""

    weight: Tensor  # [V, H]
    scale: float | None = None
    position_weight: Tensor | None = None  # [num_positions, H]; positions past the end use the last one

    def __call__(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return [..., H] for tokens [...] at positions [...]."""
        # The kernel of `functional.embedding` for few rows takes 12 us for 16 on an H200: three times indexing's time.
        few = tokens.is_cuda and tokens.numel() <= SMALL_INDEX
        rows = self.weight[tokens] if few else functional.embedding(tokens, self.weight)
        rows = rows if self.scale is None else rows * self.scale
        if self.position_weight is None or positions is None:
            return rows
        return rows + self.position_weight[positions.clamp(0, len(self.position_weight) - 1)]


class LMHead(NamedTuple):
    """Computes logits: a linear, then a scale and a soft cap where the model has them."""

    linear: Linear
    scale: float | None = None
    soft_cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return [..., V] from [..., H]."""
        return self._transformed(self.linear(hidden))

    def divided(self, hidden: Tensor) -> Tensor | DividedLogits:
        """Return [..., V] from [..., H], or this rank's columns if the vocabulary is divided."""
        logits = self.linear.divided(hidden)
        if isinstance(logits, DividedLogits):
            return logits._replace(partial=self._transformed(logits.partial))
        return self._transformed(logits)

    def _transformed(self, logits: Tensor) -> Tensor:
        if self.scale is not None:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
