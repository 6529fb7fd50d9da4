"""Drafts from an index over all texts, on the device of the slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ngram import NgramIndex
from ..host_tensors import to_device
from ..options import check_range
from ..text.files import read_text
from .base import Draft, DraftBudget, DraftRequest
from .capabilities import Learner
from .context import DraftContext
from .needs import Needs
from .proposal import Committed, Proposal, ScoredTree, makes_valid_trees, no_candidates


@dataclass
class Ngram(Draft, Learner):
    """Drafts what followed earlier occurrences of a request's last tokens, in any request's text.

    Args:
        num_nodes: tree nodes verified in a round, the root included, 1 to 256; no path is longer.
        max_tokens: tokens that the index holds before the oldest age out, 1 to 2^30.
        corpus: text files that the index starts with: what answers may repeat (documentation, code, past answers).

    Raises:
        ValueError: a number out of range; a `corpus` that is one path instead of several.
    """

    _: KW_ONLY
    num_nodes: int = 16
    max_tokens: int = 1 << 20
    corpus: Sequence[str | Path] = ()

    reads_others = True
    takes_predictions = True

    def __post_init__(self) -> None:
        for option, high in (("num_nodes", 256), ("max_tokens", 1 << 30)):
            check_range(f"Ngram: {option}", getattr(self, option), 1, high)
        if isinstance(self.corpus, str) or not isinstance(self.corpus, Sequence):
            raise ValueError(f"Ngram: corpus is {self.corpus}, expected a list of files")

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=self.num_nodes, accept_width=self.num_nodes)  # a chain of all nodes is the deepest tree

    def open(self, context: DraftContext) -> None:
        """Make the index and read the corpus.

        Raises:
            OSError: a file of the corpus cannot be read.
            ValueError: a corpus without a tokenizer, that is no text, or with tokens that the model does not have.
        """
        self.index = NgramIndex(
            max_tokens=self.max_tokens,
            num_slots=context.num_slots,
            max_len=2 * context.max_len + self.num_nodes,  # a request, and a prediction before it
            device=context.device,
        )
        self._corpus = [torch.tensor(file_tokens(file, context), dtype=torch.int32) for file in self.corpus]
        self._insert_corpus()

    def forget(self) -> None:
        self.index.clear()
        self._insert_corpus()

    def _insert_corpus(self) -> None:
        for tokens in self._corpus:
            self.index.insert(tokens.to(self.context.device))

    def begin(self, slot: int, request: DraftRequest) -> None:
        self.index.begin(slot, group=request.group, request=request.id)
        tokens = to_device(array("i", [*request.prediction, *request.tokens]), self.context.device)
        self.index.insert(tokens, slot, start=0)  # skips what the index holds of a retracted request

    @makes_valid_trees
    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        if budget.num_nodes == 1:
            return Proposal(no_candidates(slots))
        tree, scores, match_len = self.index.draft(slots, self.state.seq_lens[slots], budget.num_nodes)
        return Proposal(ScoredTree(tree, scores), note=match_len)

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        # All that was emitted, a finished slot's last tokens included: others still find its text.
        self.index.extend(committed.accepted.tokens, committed.accepted.num_valid, slots, proposal.note)

    def release(self, slot: int) -> None:
        self.index.release(slot)


def file_tokens(file: str | Path, context: DraftContext) -> list[int]:
    """Return the tokens of a text file, without special tokens."""
    if context.tokenizer is None:
        raise ValueError(f"Ngram: corpus is given, expected none ({context.no_tokenizer})")
    text = read_text(file, "Ngram: corpus")
    tokens: list[int] = context.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if tokens and not 0 <= min(tokens) <= max(tokens) < context.vocab_size:
        raise ValueError(
            f"Ngram: corpus has {file} with tokens from {min(tokens)} to {max(tokens)}, "
            f"expected 0 to {context.vocab_size - 1} (the model's vocabulary)"
        )
    return tokens
