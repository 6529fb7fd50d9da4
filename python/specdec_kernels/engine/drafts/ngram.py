"""NGRAM: the index over everything seen drafts, on the device of the slots."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ...ngram import NgramIndex
from ...ops import Accepted, Tree
from ..state import SlotState, to_device
from .base import Draft


class NgramDraft(Draft):
    def __init__(self, state: SlotState, num_nodes: int, max_tokens: int, max_len: int) -> None:
        super().__init__(state)
        self.num_nodes = num_nodes
        self.accept_width = num_nodes  # a chain of all nodes is the deepest tree
        self._match_len: Tensor | None = None  # of this round's drafts, if it has any
        self.index = NgramIndex(
            max_tokens=max_tokens,
            num_slots=len(state.seq_lens),
            max_len=max_len + num_nodes,
            device=state.seq_lens.device,
        )

    def learn(self, tokens: list[int]) -> None:
        """A document for all requests."""
        self.index.insert(torch.tensor(tokens, dtype=torch.int32, device=self.state.seq_lens.device))

    def begin(self, slot: int, request_id: int, group: int, text: list[int]) -> None:
        self.index.begin(slot, group=group, request=request_id)
        tokens = to_device(array("i", text), self.state.seq_lens.device)
        self.index.insert(tokens, slot, start=0)  # of a retracted request, what is held is skipped

    def propose(self, slots: Tensor, num_nodes: int) -> Tree:
        if num_nodes == 1:
            self._match_len = None
            return self.roots(slots)
        return self.propose_scored(slots, num_nodes)[0]

    def propose_scored(self, slots: Tensor, num_nodes: int) -> tuple[Tree, Tensor]:
        """`propose` of 2 nodes or more, and the log-probability of each [B, N]."""
        tree, scores, self._match_len = self.index.draft(slots, self.state.seq_lens[slots], num_nodes)
        return tree, scores

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        # All that was emitted, a finished slot's last tokens included: its text stays findable by others.
        self.index.extend(accepted.tokens, accepted.lengths, slots, self._match_len)

    def release(self, slot: int) -> None:
        self.index.release(slot)
