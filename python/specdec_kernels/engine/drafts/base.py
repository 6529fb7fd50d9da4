"""The interface between a round and whatever drafts for it; as it stands here it is plain decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops import Accepted, Tree, build_tree
from ..prefill import Prefill
from ..state import SlotState


class DrawnFrom(NamedTuple):
    """What a round's candidates were drawn from, as `verify_tree` takes it."""

    draft_logits: Tensor  # [B, Q, Vd]
    draft_rows: Tensor  # [B, N]
    id_map: Tensor | None  # [Vd]


class Draft:
    """Drafts nothing: every tree is its root, every round emits the bonus token alone.

    `propose` and `extend` leave the host alone, so that a graph can hold them.

    Attributes:
        num_nodes: N, most nodes of a tree. accept_width: S, most tokens a round can emit.
        drawn_from: where the last `propose` drew its candidates; None: they were chosen.
    """

    num_nodes = 1
    accept_width = 1
    drawn_from: DrawnFrom | None = None

    def __init__(self, state: SlotState) -> None:
        self.state = state
        device = state.seq_lens.device
        self._no_tokens = torch.empty(len(state.seq_lens), 0, dtype=torch.int32, device=device)
        self._no_scores = torch.empty(len(state.seq_lens), 0, dtype=torch.float32, device=device)

    @property
    def num_pool_bytes(self) -> int:
        """Of the draft's own KV pools."""
        return 0

    def resize_pools(self, num_pages: int) -> None:
        """Make these pools anew, with another number of pages."""

    def detach_pools(self) -> None:
        """Take these pools out of a module that may serve another engine."""

    def begin(self, slot: int, request_id: int, group: int, text: list[int]) -> None:
        """The slot now belongs to a request with this text: its prompt, and what it produced before a retraction.

        `group` is who shares its text (`SamplingParams.ngram_group`).
        """

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        """The target has just run these pieces of prompts; `features` [P, Q, n * H] are its states, as in `extend`."""

    def activate(self, slots: Tensor) -> None:
        """Prefill of slots [R] is complete: their roots and lengths are set, their first round comes next."""

    def propose(self, slots: Tensor, num_nodes: int) -> Tree:
        """This round's trees of slots [B]: of a larger `num_nodes`, the first nodes are those of a smaller one."""
        return self.roots(slots)

    def roots(self, slots: Tensor) -> Tree:
        """Trees that are their root."""
        batch = len(slots)
        return build_tree(
            self._no_tokens[:batch],
            self._no_tokens[:batch],
            self._no_scores[:batch],
            self.state.root_tokens,
            self.state.seq_lens,
            1,
            slots=slots,
            status=self.state.status,
        )

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        """The round's tokens are committed; `num_valid` [B] of each row count (0: nothing, or the slot finished).

        `features` [B, num_nodes, n * H] are the target's states of the tree's nodes, if the draft asked for any. No row
        has more than `num_nodes` tokens.
        """

    def release(self, slot: int) -> None:
        """The slot's request is gone."""
