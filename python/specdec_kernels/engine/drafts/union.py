"""Two drafts propose every round, and the best nodes of either are verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.kv_pools import KvPools
from ...ops import merge_trees
from ..device.prefill import Prefill
from .base import Draft, DraftBudget, DraftContext, DraftRequest, Needs
from .proposal import Committed, Proposal, ScoredTree, no_candidates, scored_tree_of


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
        if not 1 <= self.num_nodes <= 256:
            raise ValueError(f"Union: num_nodes is {self.num_nodes}, expected 1 to 256")
        for name, draft in (("first", self.first), ("second", self.second)):
            if not isinstance(draft, Draft):
                raise ValueError(f"Union: {name} is a {type(draft).__name__}, expected a Draft")
            if draft.sampled:
                raise ValueError(f"Union: {name} is a {type(draft).__name__} with sampled=True, expected sampled=False")
        if self.first is self.second:
            raise ValueError("Union: first and second are one object, expected two")
        self.cacheable = self.first.cacheable and self.second.cacheable
        self.reads_others = self.first.reads_others or self.second.reads_others
        self.takes_predictions = self.first.takes_predictions or self.second.takes_predictions

    def needs(self, target: Any) -> Needs:
        first, second = self.first.needs(target), self.second.needs(target)
        return Needs(
            num_nodes=self.num_nodes,
            accept_width=max(first.accept_width, second.accept_width),
            feature_layers=first.feature_layers + second.feature_layers,
            scratch_rows=max(first.scratch_rows, second.scratch_rows),
            kv_numbers=first.kv_numbers + second.kv_numbers,
            attention=first.attention + second.attention,
            max_idle_rounds=min(filter(None, (first.max_idle_rounds, second.max_idle_rounds)), default=0),
            num_steps=max(first.num_steps, second.num_steps),
        )

    def expect_closed(self) -> None:
        super().expect_closed()
        self.first.expect_closed()
        self.second.expect_closed()

    def open(self, context: DraftContext) -> None:
        super().open(context)
        first, second = (draft.needs(context.target.config) for draft in (self.first, self.second))
        self._most = first.num_nodes, second.num_nodes
        self._has_levels = first.num_steps > 0, second.num_steps > 0
        # What each asked for of the target's states, which stand side by side.
        self._layers = len(first.feature_layers), len(second.feature_layers)
        self.first.open(context)
        self.second.open(context)

    def close(self) -> None:
        for draft in (self.first, self.second):
            if draft.is_open:  # not where opening it failed
                draft.close()
        super().close()

    @property
    def parts(self) -> list[Draft]:
        return [*self.first.parts, *self.second.parts]

    @property
    def pools(self) -> list[KvPools]:
        return [*self.first.pools, *self.second.pools]

    def resize_pools(self, num_pages: int) -> None:
        self.first.resize_pools(num_pages)
        self.second.resize_pools(num_pages)

    def sleep(self, level: int) -> None:
        self.first.sleep(level)
        self.second.sleep(level)

    def wake(self, level: int, num_pages: int) -> None:
        self.first.wake(level, num_pages)
        self.second.wake(level, num_pages)

    def begin_anew(self) -> None:
        self.first.begin_anew()
        self.second.begin_anew()

    def begin(self, slot: int, request: DraftRequest) -> None:
        self.first.begin(slot, request)
        self.second.begin(slot, request)

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        first, second = self._states(features)
        self.first.prefill(prefill, first)
        self.second.prefill(prefill, second)

    def activate(self, slots: Tensor) -> None:
        self.first.activate(slots)
        self.second.activate(slots)

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        drafts, num_nodes = (self.first, self.second), budget.num_nodes
        if num_nodes == 1:
            return Proposal(no_candidates(slots), note=([draft.propose(slots, budget) for draft in drafts], None))
        # One that both drafted may come before others of its own tree, so that all nodes of both are united; where a
        # level is a pass of a model, those of as many levels as the tree may have.
        asked = zip(drafts, self._most, self._has_levels, strict=True)
        both = [
            draft.propose(slots, budget._replace(num_nodes=min(most, num_nodes) if levels else most))
            for draft, most, levels in asked
        ]
        trees = [scored_tree_of(p.drafts, slots, n, self.state) for p, n in zip(both, self._most, strict=True)]
        return Proposal(ScoredTree(*merge_trees(*trees[0], *trees[1], num_nodes)), note=(both, trees))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        states = self._states(features)
        proposals, trees = proposal.note
        # Whoever wants no drafts may have rested for good, and says nothing of what a draft is worth.
        wanted = self.state.max_nodes[slots.clamp(min=0)]
        for index, draft in enumerate((self.first, self.second)):
            own = committed
            if trees:
                tree, scores = trees[index]
                tree = tree._replace(num_nodes=torch.minimum(tree.num_nodes, wanted))
                own = committed._replace(tree=ScoredTree(tree, scores))
            draft.extend(slots, own, proposals[index], states[index])

    def rest(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        states, (proposals, _) = self._states(features), proposal.note
        self.first.rest(slots, committed, proposals[0], states[0])
        self.second.rest(slots, committed, proposals[1], states[1])

    def catch_up(self, slots: Tensor, max_kv_len: int | None = None) -> None:
        self.first.catch_up(slots, max_kv_len)
        self.second.catch_up(slots, max_kv_len)

    def save(self, slot: int) -> dict[str, Tensor]:
        both = (("first", self.first), ("second", self.second))
        return {f"{name}.{key}": tensor for name, draft in both for key, tensor in draft.save(slot).items()}

    def restore(self, slot: int, kept: Mapping[str, Tensor]) -> None:
        for name, draft in (("first.", self.first), ("second.", self.second)):
            draft.restore(slot, {key.removeprefix(name): kept[key] for key in kept if key.startswith(name)})

    def _states(self, features: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What each draft asked for, of states that stand side by side."""
        if features is None:
            return None, None
        before, behind = self._layers
        cut = features.shape[-1] // (before + behind) * before
        first, second = features[..., :cut].contiguous(), features[..., cut:].contiguous()
        return first if before else None, second if behind else None

    def release(self, slot: int) -> None:
        self.first.release(slot)
        self.second.release(slot)
