"""Two drafts propose in every round, and the best nodes of both are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ops import merge_trees
from ..options import check_range
from .base import Draft, DraftBudget
from .context import DraftContext, PrefillRows
from .needs import Needs
from .ngram import Ngram
from .proposal import Committed, Proposal, ScoredTree, makes_valid_trees, no_candidates, propose, scored_tree_of


@dataclass
class Union(Draft):
    """The union of the trees of two drafts, cut to its best nodes by their scores.

    Args:
        first, second: any two drafts, unions included. Each proposes at most its own `num_nodes`.
        num_nodes: tree nodes verified in a round, the root included, 1 to 256.

    Raises:
        ValueError: a number out of range; one draft twice; a draft whose candidates are drawn (`sampled`): nodes that
            are chosen by score are no draws.
    """

    first: Draft
    second: Draft
    _: KW_ONLY
    num_nodes: int = 32

    def __post_init__(self) -> None:
        check_range("Union: num_nodes", self.num_nodes, 1, 256)
        for name, draft in (("first", self.first), ("second", self.second)):
            if not isinstance(draft, Draft):
                raise ValueError(f"Union: {name} is a {type(draft).__name__}, expected a Draft")
            if draft.sampled:
                raise ValueError(f"Union: {name} is a {type(draft).__name__} with sampled=True, expected sampled=False")
        if self.first is self.second:
            raise ValueError("Union: first and second are one object, expected two")
        self.cacheable = all(draft.cacheable for draft in self.members)
        self.reads_others = any(draft.reads_others for draft in self.members)
        self.takes_predictions = any(draft.takes_predictions for draft in self.members)

    @property
    def members(self) -> tuple[Draft, ...]:
        return self.first, self.second

    def needs(self, target: Any) -> Needs:
        first, second = (draft.needs(target) for draft in self.members)
        return Needs(
            num_nodes=self.num_nodes,
            accept_width=max(first.accept_width, second.accept_width),
            feature_layers=first.feature_layers + second.feature_layers,
            tensor_prefixes=first.tensor_prefixes + second.tensor_prefixes,
            scratch_rows=max(first.scratch_rows, second.scratch_rows),
            kv_numbers=first.kv_numbers + second.kv_numbers,
            kv_windows=tuple(window for each in (first, second) if each.kv_numbers for window in each.kv_windows),
            attention=first.attention + second.attention,
            max_idle_rounds=min(filter(None, (first.max_idle_rounds, second.max_idle_rounds)), default=0),
            num_steps=max(first.num_steps, second.num_steps),
            lookahead=max(first.lookahead, second.lookahead),
        )

    def open(self, context: DraftContext) -> None:
        needs = [draft.needs(context.target.config) for draft in self.members]
        self._most_nodes = [each.num_nodes for each in needs]
        self._has_levels = [each.num_steps > 0 for each in needs]
        self._num_layers = [len(each.feature_layers) for each in needs]

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        for draft, own in zip(self.members, self._split(features), strict=True):
            draft.prefill(prefill, own)

    @makes_valid_trees
    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        num_nodes = budget.num_nodes
        if num_nodes == 1:
            return Proposal(
                no_candidates(slots), note=([propose(draft, slots, budget) for draft in self.members], None)
            )
        # A node that both drafted may rank before others of its own tree, so all nodes of both are merged; only drafts
        # for which a level is a pass of a model draft no more levels than the tree may have.
        proposals = [
            propose(draft, slots, budget._replace(num_nodes=min(most, num_nodes) if has_levels else most))
            for draft, most, has_levels in zip(self.members, self._most_nodes, self._has_levels, strict=True)
        ]
        trees = [
            scored_tree_of(proposal.drafts, slots, most, self.state)
            for proposal, most in zip(proposals, self._most_nodes, strict=True)
        ]
        return Proposal(ScoredTree(*merge_trees(*trees[0], *trees[1], num_nodes)), note=(proposals, trees))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        proposals, trees = proposal.note
        each = [committed, committed]
        if trees:
            # A slot that wants no drafts may have been idle for long: its trees say nothing of what a draft is worth.
            wanted = self.state.max_nodes[slots.clamp(min=0)]
            for index, (tree, scores) in enumerate(trees):
                tree = tree._replace(num_nodes=torch.minimum(tree.num_nodes, wanted))
                each[index] = committed._replace(tree=ScoredTree(tree, scores))
        for draft, *own in zip(self.members, each, proposals, self._split(features), strict=True):
            draft.extend(slots, *own)

    def _split(self, features: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the states that each draft asked for, of those of all layers [..., n * H]."""
        if features is None:
            return None, None
        num_first, num_second = self._num_layers
        cut = features.shape[-1] // (num_first + num_second) * num_first
        first, second = features[..., :cut].contiguous(), features[..., cut:].contiguous()
        return first if num_first else None, second if num_second else None


def with_ngrams(draft: Draft, num_nodes: int, corpus: Sequence[str | Path] = ()) -> Union:
    """Return the union of a draft and an n-gram index, which verifies `num_nodes` nodes.

    Args:
        draft: proposes at most its own `num_nodes`.
        num_nodes: of the index, and of both together; the root included.
        corpus: text files that the index starts with.

    Raises:
        ValueError: as `Union` and `Ngram`.
    """
    return Union(draft, Ngram(num_nodes=num_nodes, corpus=corpus), num_nodes=num_nodes)
