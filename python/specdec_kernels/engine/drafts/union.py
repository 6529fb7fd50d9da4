"""EAGLE3+NGRAM: both draft every round, and the best nodes of either are verified."""

from __future__ import annotations

from torch import Tensor

from ...ops import Accepted, Tree, merge_trees
from ..prefill import Prefill
from ..state import SlotState
from .base import Draft
from .model import ModelDraft
from .ngram import NgramDraft


class UnionDraft(Draft):
    """The union of a model's tree and the index's, cut to `num_nodes` by log-probability."""

    def __init__(self, state: SlotState, model: ModelDraft, ngram: NgramDraft, num_nodes: int) -> None:
        super().__init__(state)
        self.model, self.ngram = model, ngram
        self.num_nodes = num_nodes
        self.accept_width = max(model.accept_width, ngram.accept_width)

    @property
    def num_pool_bytes(self) -> int:
        return self.model.num_pool_bytes

    def resize_pools(self, num_pages: int) -> None:
        self.model.resize_pools(num_pages)

    def learn(self, tokens: list[int]) -> None:
        """A document for all requests."""
        self.ngram.learn(tokens)

    def begin(self, slot: int, request_id: int, group: int, text: list[int]) -> None:
        self.model.begin(slot, request_id, group, text)
        self.ngram.begin(slot, request_id, group, text)

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        self.model.prefill(prefill, features)

    def activate(self, slots: Tensor) -> None:
        self.model.activate(slots)

    def propose(self, slots: Tensor, num_nodes: int) -> Tree:
        if num_nodes == 1:
            return self.ngram.propose(slots, 1)
        trees = (*self.ngram.propose_scored(slots, num_nodes), *self.model.propose_scored(slots, num_nodes))
        union, _scores = merge_trees(*trees, num_nodes)
        return union

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        self.model.extend(slots, accepted, num_valid, features, num_nodes)
        self.ngram.extend(slots, accepted, num_valid, features, num_nodes)

    def release(self, slot: int) -> None:
        self.model.release(slot)
        self.ngram.release(slot)
