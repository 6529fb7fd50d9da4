"""NGRAM: the index over everything seen drafts on the host; its tree goes to the device once a round."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ngram import NgramIndex
from ...ops import Accepted, Tree
from ..state import SlotState
from .base import Draft


class NgramDraft(Draft):
    on_device = False

    def __init__(self, state: SlotState, num_nodes: int, max_tokens: int, max_len: int) -> None:
        super().__init__(state)
        self.num_nodes = num_nodes
        self.accept_width = num_nodes  # a chain of all nodes is the deepest tree
        self.index = NgramIndex(max_tokens=max_tokens, num_slots=len(state.seq_lens), max_len=max_len + num_nodes)

    def learn(self, tokens: list[int]) -> None:
        """A document for all requests."""
        self.index.insert(torch.tensor(tokens, dtype=torch.int32))

    def begin(self, slot: int, request_id: int, tokens: list[int]) -> None:
        held = self.index.begin(slot, request=request_id)  # of a request that was retracted
        self.index.insert(torch.tensor(tokens[held:], dtype=torch.int32), slot)

    def propose(self, slots: Tensor) -> Tree:
        seq_lens = self.state.seq_lens[slots].cpu()
        tree, _scores, self._match_len = self.index.draft(slots.cpu(), seq_lens, self.num_nodes)
        return Tree(*(tensor.to(slots.device) for tensor in tree))

    def extend(self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None) -> None:
        # All that was emitted, a finished slot's last tokens included: its text stays findable by others.
        self.index.extend(accepted.tokens.cpu(), accepted.lengths.cpu(), slots.cpu(), self._match_len)

    def release(self, slot: int) -> None:
        self.index.release(slot)
