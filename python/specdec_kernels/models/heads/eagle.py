"""EAGLE and EAGLE-2 draft heads in their published checkpoint format (Li et al. 2024, arXiv 2401.15077, 2406.16858).

The two papers share the head and differ in the tree that it drafts. The head has decoder layers, mostly one, the first
without an input norm. Their input is `fc` of the embedding of token i+1 and the feature of position i, concatenated.
The feature is the target's state after its final norm. The output predicts token i+2 through the target's `lm_head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..backends.native import CausalLM
from ..language_model import LanguageModel
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding
from ..layers.linear import Linear, linear_of
from ..layers.norm import add_residual
from ..layers.outputs import LayerOutput
from ..weights.checkpoint import EAGLE
from .base import DraftHead, Features, HeadLayer, HeadOutput, Parts


class EagleParts(NamedTuple):
    embedding: Embedding
    fc: Linear
    layers: list[Layer]
    head: Linear


class EagleHead(DraftHead):
    """A head of EAGLE. Its `embed_tokens` and `lm_head` are its own or the target's."""

    kind, name = EAGLE, "EAGLE"
    _parts: EagleParts

    def __init__(self, config: LlamaConfig, parts: Parts | None = None, draft_vocab: int | None = None) -> None:
        super().__init__(config)
        parts, hidden = parts or Parts(), config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias="fc" in parts.biases)
        norms = ["input_layernorm"]
        self.layers = nn.ModuleList(
            HeadLayer(config, parts, hidden, *(norms if index or parts.first_norm else ()))
            for index in range(parts.num_layers)
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, draft_vocab or config.vocab_size, bias=False)

    @classmethod
    def made_for(
        cls, config: LlamaConfig, tensors: Mapping[str, Tensor], draft_vocab: int, num_layers: int
    ) -> EagleHead:
        return cls(config, Parts.of(tensors), draft_vocab)

    def prepare(self, target: LanguageModel, num_pages: int, page_size: int) -> None:
        if not isinstance(target, CausalLM):
            raise ValueError(
                "EAGLE head: the target runs by transformers' modules, expected a native one (EAGLE-3 takes either)"
            )
        self._target = target  # no nn.Module, so its parameters do not become the head's
        super().prepare(target, num_pages, page_size)

    def _make_parts(self) -> EagleParts:
        head = linear_of(self.lm_head)
        return EagleParts(
            embedding=Embedding(self.embed_tokens.weight.detach()),
            fc=linear_of(self.fc),
            layers=self._make_layers(),
            head=head if self._among is None else head.permute_outputs(self._among),
        )

    def join(self, features: Tensor) -> Tensor:
        """Return the states after the target's final norm [..., H], from those before it."""
        return self._target.decoder.norm(features)

    def enter(self, tokens: Tensor, features: Features, positions: Tensor) -> tuple[Tensor, Tensor]:
        each = features.table if features.rows is None else features.table[features.rows]
        state = self._parts.fc(torch.cat([self._parts.embedding(tokens.flatten()), each], dim=-1))
        norm = self._parts.layers[0].input_norm
        return state if norm is None else norm(state), state

    def leave(self, x: LayerOutput, residual: Tensor | None) -> HeadOutput:
        hidden = add_residual(x, residual, None)
        return HeadOutput(hidden, hidden)  # it predicts the target's normed state
