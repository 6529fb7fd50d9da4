"""EAGLE3+NGRAM: both draft every round, and the best nodes of either are verified."""

from __future__ import annotations

from torch import Tensor

from ...ops import Accepted, Tree, merge_trees
from ..state import SlotState
from .base import Draft
from .model import ModelDraft
from .ngram import NgramDraft


class UnionDraft(Draft):
    """The union of a model's tree and the index's, cut to `num_nodes` by log-probability."""

    def __init__(self, state: SlotState, model: ModelDraft, ngram: NgramDraft, num_nodes: int) -> None:
        super().__init__(state)
        self.model, self.ngram = model, ngram
        self.on_device = model.on_device and ngram.on_device
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

    def begin(self, slot: int, request_id: int, tokens: list[int]) -> None:
        self.model.begin(slot, request_id, tokens)
        self.ngram.begin(slot, request_id, tokens)

    def prefill(
        self, slot: Tensor, tokens: Tensor, next_tokens: Tensor, positions: Tensor, features: Tensor | None
    ) -> None:
        self.model.prefill(slot, tokens, next_tokens, positions, features)

    def activate(self, slot: Tensor) -> None:
        self.model.activate(slot)

    def propose(self, slots: Tensor, num_nodes: int) -> Tree:
        if num_nodes == 1:
            return self.ngram.propose(slots, 1)
        # All the index has, since what follows puts its nodes into another order.
        tree, scores, match_len = self.ngram.propose_scored(slots, self.num_nodes)
        # The index shares out what follows the places it found, as if one of them were followed. After m tokens that
        # agreed the next one does with (m + 1) / (m + 2), Laplace's rule of succession; and d in a row:
        agreed = (match_len + 1)[:, None]
        scores = scores + (agreed / (agreed + tree.positions - tree.positions[:, :1])).log()
        union, _scores = merge_trees(tree, scores, *self.model.propose_scored(slots, num_nodes), num_nodes)
        return union

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        self.model.extend(slots, accepted, num_valid, features, num_nodes)
        self.ngram.extend(slots, accepted, num_valid, features, num_nodes)

    def release(self, slot: int) -> None:
        self.model.release(slot)
        self.ngram.release(slot)
