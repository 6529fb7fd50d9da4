"""A small model drafts, with the target's vocabulary or one that shares tokens with it.

Draft row i is token i, so the draft is one row ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.backends.select import open_language_model
from ...models.families import family_of, known_families
from ...models.heads.base import Features
from ...models.language_model import LanguageModel
from ...models.layers.paged_batch import PagedBatch
from ...models.options import ModelOptions
from ...models.weights.checkpoint import expect_folder
from ...models.weights.model_config import config_of, model_name
from ...ops import DraftExtendInputs
from ..text.prompts import load_tokenizer
from .context import DraftContext, PrefillRows
from .model import ModelDraft
from .needs import Needs
from .vocabularies import SharedTokens, shared_tokens


@dataclass
class Standalone(ModelDraft):
    """Drafts with a small model.

    If its tokenizer differs from the target's, or the size of its vocabulary, it proposes the tokens that both have, by
    their text (token-level intersection; Timor et al. 2025, arXiv 2502.05202), and its distribution is the one over
    these. A token that it does not have is fed as the last one that its own tokenizer makes of the text. The output is
    still the target's; only acceptance is lower.

    Args:
        model: folder or hub id of a language model, or the module itself, whose weights are shared.
        tokenizer: the model's, or its folder or hub id; None: the one of the model's folder, if there is one.
        num_steps, topk, num_nodes, sampled: as for `Eagle3`.

    Raises:
        ValueError: a number out of range; `sampled` with more than one branch; a model that is none; when it is opened,
            vocabularies of two sizes without a tokenizer of each, or that share fewer than `topk` tokens.
    """

    model: str | Path | nn.Module
    tokenizer: Any = field(default=None, kw_only=True)

    position_offset = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, str | Path | nn.Module):
            given = f"a {type(self.model).__name__}"
            raise ValueError(f"Standalone: model is {given}, expected a folder, a hub id or a module")

    @property
    def model_name(self) -> str:
        return model_name(self.model)

    def needs(self, target: Any) -> Needs:
        expect_folder(self.model, "Standalone: model")
        config = config_of(self.model, "draft model")
        if config.model_type in known_families() and family_of(config).state_specs(torch.float32):
            raise ValueError(
                f"Standalone: model is a {config.model_type}, whose layers keep a recurrent state, "
                "expected one with KV in every layer"
            )
        return self.model_needs(config, config.num_hidden_layers, follows_kv_dtype=True)

    def open(self, context: DraftContext) -> None:
        super().open(context)
        self.shared = self._shared_tokens(context)
        weight = context.target.embedding.weight
        options = ModelOptions(
            max_len=context.max_len,
            num_pages=context.num_pages,
            page_size=context.page_size,
            dtype=weight.dtype,
            device=weight.device,
            kv_dtype=context.target.pools.dtype,
            name="draft model",
        )
        self.lm = open_language_model(self.model, options)
        if self.shared is not None:
            self.shared = SharedTokens(*(ids.to(weight.device) for ids in self.shared))
            self.id_map = self.shared.target_ids
        if self.sampled:
            size = self.lm.config.vocab_size if self.id_map is None else len(self.id_map)
            self.allocate_root_logits(self.lm.embedding.weight.new_empty(1, size))

    def _shared_tokens(self, context: DraftContext) -> SharedTokens | None:
        """Return how the two vocabularies translate; None where they are the same."""
        sizes = context.vocab_size, config_of(self.model, "draft model").vocab_size
        tokenizer, reason = load_tokenizer(self.model, self.tokenizer, trust_remote_code=False)
        if tokenizer is None or context.tokenizer is None:
            if sizes[0] == sizes[1]:
                return None
            whose = f"draft: {reason}" if tokenizer is None else f"target: {context.no_tokenizer}"
            raise ValueError(
                f"Standalone: model has vocab_size {sizes[1]}, expected the target's {sizes[0]}, "
                f"or a tokenizer of both ({whose})"
            )
        shared = shared_tokens(context.tokenizer, sizes[0], tokenizer, sizes[1])
        if shared is not None and len(shared.draft_ids) < self.topk:
            count = len(shared.draft_ids)
            raise ValueError(
                f"Standalone: model shares {count} tokens with the target, expected at least topk={self.topk}"
            )
        return shared

    def _forward(self, tokens: Tensor, positions: Tensor, rows: PagedBatch) -> Tensor:
        """Return the states at tokens of the target."""
        return self.lm.forward(self._fed(tokens), positions, rows).hidden

    def _fed(self, tokens: Tensor) -> Tensor:
        """Return what the model reads for tokens of the target."""
        return tokens if self.shared is None else self.shared.fed_ids[tokens.long()]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., K] of the tokens that can be proposed."""
        logits = self.lm.logits(hidden)
        return logits if self.shared is None else torch.index_select(logits, -1, self.shared.draft_ids)

    @property
    def loaded(self) -> LanguageModel:
        return self.lm

    def step(
        self, depth: int, tokens: Tensor, positions: Tensor, features: Features | None, rows: PagedBatch
    ) -> tuple[Tensor, None]:
        return self._logits(self._forward(tokens, positions, rows)).flatten(0, 1), None

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        self.lm.prefill(self._fed(prefill.tokens), prefill.positions, prefill.rows)

    def run_committed(self, extend: DraftExtendInputs, features: Tensor | None, rows: PagedBatch) -> None:
        hidden = self._forward(extend.tokens, extend.positions, rows).flatten(0, 1)
        self.set_root_children(extend.kept_slots, self._logits(hidden[extend.last_rows]))
