"""Drafting with a model: expand the k best paths step by step, then keep the best nodes (EAGLE-2, arXiv 2406.16858).

`docs/round.md` fixes which token stands in which row and where it is rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.draft_head import Features
from ...ops import Candidates, Tree, build_tree, expand_root, expand_tree, sample_draft, select_topk
from ..state import SlotState
from .base import Draft, DrawnFrom

SEED_OF_ROUND = -0x61C8864680B583EB  # odd, 2^64 over the golden ratio: far from what seeds differ by


class ModelDraft(Draft):
    """The loop that EAGLE heads and standalone models share; they supply `step` and feed `set_root_children`.

    Draft state, per slot: the root's k best children (ids, log-probabilities), ready before the round starts. One row
    more, behind the slots, is what empty rows of a batch (slot -1) read, and rows that have nothing to keep write.

    With `draws` (and k = 1) children of requests that sample are drawn, for `verify_tree` to accept or reject as a
    block. Then the root's logits are kept instead, and its child is drawn in the round, where the request's parameters
    are known.
    """

    position_offset = 0  # a depth-d node is rotated at L + position_offset + d - 1
    id_map: Tensor | None = None

    def __init__(self, state: SlotState, num_steps: int, topk: int, num_nodes: int, draws: bool) -> None:
        super().__init__(state)
        self.num_steps, self.topk, self.num_nodes, self.draws = num_steps, topk, num_nodes, draws
        self.accept_width = num_steps + 1
        slots, device = len(state.seq_lens), state.seq_lens.device
        self.child_ids = torch.zeros(slots + 1, topk, dtype=torch.int32, device=device)
        self.child_logprobs = torch.full((slots + 1, topk), -torch.inf, device=device)
        rows = torch.arange(-1, num_nodes - 1, dtype=torch.int32, device=device)  # node i is drawn from row i - 1
        self._draft_rows = rows.where(rows < num_steps, -1).repeat(slots, 1)

    def keep_logits(self, like: Tensor) -> None:
        """Makes room for the slots' logits [Vd] behind the root, of which `like` has a row."""
        self.root_logits = like.new_full((len(self.child_ids), like.shape[-1]), -torch.inf)

    def begin(self, slot: int, request_id: int, group: int, text: list[int]) -> None:
        # Without a prefilled row there are no children: a one-token prompt starts with a root-only tree.
        self.child_logprobs[slot] = -torch.inf
        if self.draws:
            self.root_logits[slot] = -torch.inf

    def prefix_lens(self) -> Tensor:
        """[num_slots] draft rows committed before the round."""
        return self.state.seq_lens

    def start(self, slots: Tensor) -> Features | None:
        """The features of the slots' B * k depth-1 nodes, for drafts that carry any."""
        return None

    def step(
        self, tokens: Tensor, positions: Tensor, features: Features | None, rows: object
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B * k, Vd] of frontier nodes [B, k], and their own features [B * k, H]."""
        raise NotImplementedError

    def set_root_children(self, rows: Tensor, logits: Tensor) -> None:
        """Rank or keep logits [B, Vd] as these rows of the draft state."""
        if self.draws:
            self.root_logits[rows] = logits
            return
        self.child_ids[rows], self.child_logprobs[rows] = select_topk(logits, self.topk, id_map=self.id_map)

    def propose(self, slots: Tensor, num_nodes: int) -> Tree:
        self.drawn_from = None
        if num_nodes == 1:
            return self.roots(slots)
        return self._tree(slots, self._candidates(slots, num_nodes), num_nodes)

    def propose_scored(self, slots: Tensor, num_nodes: int) -> tuple[Tree, Tensor]:
        """`propose` of 2 nodes or more, and their log-probabilities [B, N]: 0 for the root, -inf for unused ones."""
        candidates = self._candidates(slots, num_nodes)
        count = min(num_nodes - 1, candidates.scores.shape[1])
        scores = candidates.scores.new_full((len(slots), num_nodes), -torch.inf)
        scores[:, 0] = 0
        scores[:, 1 : count + 1] = candidates.scores.topk(count).values  # nodes stand best first
        return self._tree(slots, candidates, num_nodes), scores

    def _tree(self, slots: Tensor, candidates: Candidates, num_nodes: int) -> Tree:
        state = self.state
        return build_tree(*candidates, state.root_tokens, state.seq_lens, num_nodes, slots=slots, status=state.status)

    def _candidates(self, slots: Tensor, num_nodes: int) -> Candidates:
        state, k = self.state, self.topk
        num_steps = min(self.num_steps, num_nodes - 1)  # deeper than its nodes in a row no tree can be
        drawn_from: list[Tensor] = []  # logits [B, Vd] of each step
        # The drafts of a block that is rejected are thrown away: their noise must not come back in the next round.
        seeds = torch.add(state.seeds, state.seq_lens, alpha=SEED_OF_ROUND) if self.draws else state.seeds

        def children(logits: Tensor) -> tuple[Tensor, Tensor]:
            if not self.draws:
                return select_topk(logits, k, id_map=self.id_map)
            drawn_from.append(logits)
            positions = state.seq_lens[slots] + len(drawn_from)
            return sample_draft(
                logits,
                1,
                seeds=seeds,
                positions=positions,
                temperature=state.temperature,
                slots=slots,
                id_map=self.id_map,
            )

        if self.draws:
            self.child_ids[slots], self.child_logprobs[slots] = children(self.root_logits[slots])
        candidates, frontier = expand_root(
            self.child_ids[:-1],
            self.child_logprobs[:-1],
            state.seq_lens,
            num_steps,
            slots=slots,
            position_offset=self.position_offset,
        )
        tokens, positions, features = frontier.tokens, frontier.positions, self.start(slots)
        prefix_lens = self.prefix_lens()
        for step in range(2, num_steps + 1):
            rows = state.rows(
                slots, prefix_lens, tail_len=(step - 1) * k, row_offset=(step - 2) * k, mask=frontier.mask
            )
            logits, hidden = self.step(tokens, positions, features, rows)
            ids, logprobs = children(logits)
            tokens, parent_rows, positions = expand_tree(
                ids.view(-1, k, k),
                logprobs.view(-1, k, k),
                step,
                *candidates,
                frontier.nodes,
                frontier.mask,
                state.seq_lens,
                slots=slots,
                position_offset=self.position_offset,
            )
            if hidden is not None:  # a chain's rows stay where they are
                features = Features(hidden, None if k == 1 else parent_rows.flatten())
        if self.draws:
            draft_rows = self._draft_rows[: len(slots), :num_nodes].contiguous()
            self.drawn_from = DrawnFrom(torch.stack(drawn_from, 1), draft_rows, self.id_map)
        return candidates
