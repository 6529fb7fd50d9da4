"""One speculative round, from the host's commands to the results it reads (docs/round.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM
from ..ops import (
    Accepted,
    TokenScores,
    Tree,
    alloc_pages,
    apply_commands,
    commit_tokens,
    free_pages,
    mask_stops,
    move_kv,
    publish_results,
    score_tokens,
    verify_tree,
)
from .drafts import Draft
from .state import Rings, SlotState

# Rows that a product takes as long to multiply as it takes to read its weight, about.
CHEAP_ROWS = 200


@dataclass(frozen=True)
class RoundResult:
    """Device tensors of one round's rows: what was committed, how likely, and how many nodes each tree had [B]."""

    accepted: Accepted
    scores: TokenScores
    num_nodes: Tensor


class Round:
    """What the host launches, as a graph or call by call; all it reads and writes stays at its place."""

    def __init__(self, target: CausalLM, draft: Draft, state: SlotState, rings: Rings, reserve: int) -> None:
        self.target, self.draft, self.state, self.rings, self.reserve = target, draft, state, rings, reserve
        self._no_rows = torch.zeros_like(state.seq_lens)

    @torch.inference_mode()
    def launch(self, batch: int, num_nodes: int) -> None:
        """Apply the next record of commands, advance its first `batch` slots by one round and publish the results.

        With batch 0 the record is all. `num_nodes` of each tree are at most the draft's own.
        """
        state, rings = self.state, self.rings
        self._apply_commands()
        free_pages(state.pool, self._no_rows, slots=rings.given_back, status=state.status)
        if batch == 0:
            return
        slots = rings.slots[:batch]
        result = self.run(slots, num_nodes)
        publish_results(
            rings.results,
            rings.num_published,
            rings.started_at,
            result.accepted.tokens,
            result.accepted.lengths,
            result.accepted.path,
            result.num_nodes,
            state.finish_reasons,
            state.status,
            slots=slots,
            **result.scores._asdict(),
            num_logprobs=state.num_logprobs,
        )

    def _apply_commands(self) -> None:
        state, rings = self.state, self.rings
        apply_commands(
            rings.commands,
            rings.num_applied,
            rings.started_at,
            state.seq_lens,
            state.root_tokens,
            state.remaining,
            state.stop_tokens,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seeds,
            state.stops_from,
            state.num_logprobs,
            state.finish_reasons,
            state.status,
            out_slots=rings.slots,
            out_given_back=rings.given_back,
        )

    @torch.inference_mode()
    def run(self, slots: Tensor, num_nodes: int) -> RoundResult:
        """Advance slots [B] by one round; nothing here reads a device value on the host."""
        state, draft = self.state, self.draft
        alloc_pages(state.pool, state.seq_lens, self.reserve, slots=slots, status=state.status)

        tree = draft.propose(slots, num_nodes)
        rows = state.rows(slots, state.seq_lens, tail_len=num_nodes, mask=tree.mask, num_valid=tree.num_nodes)
        hidden = self.target.forward(tree.tokens, tree.positions, rows)
        features = self.target.features()
        if self._goes_by_levels(len(slots), num_nodes):
            logits = self._logits_by_levels(hidden, tree, slots)
        else:
            logits = self._logits(hidden, tree.positions, slots)
        accepted = self._verify(logits, tree, draft.accept_width, slots, state.status)
        num_valid = commit_tokens(
            accepted.tokens,
            accepted.lengths,
            state.stop_tokens,
            state.remaining,
            state.max_lens,
            state.seq_lens,
            state.seq_lens_before,
            state.root_tokens,
            state.finish_reasons,
            slots=slots,
            status=state.status,
        )
        scores = score_tokens(
            logits,
            accepted.path,
            accepted.tokens,
            accepted.lengths,
            top_n=self.rings.top_n,
            slots=slots,
            num_logprobs=state.num_logprobs,
        )
        pools = self.target.pools
        move_kv(
            pools.k,
            pools.v,
            state.pool.page_table,
            accepted.path,
            num_valid,
            state.seq_lens_before,
            slots=slots,
            status=state.status,
        )
        draft.extend(slots, accepted, num_valid, features, num_nodes)
        return RoundResult(accepted, scores, tree.num_nodes)

    def _logits(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """[B, Q, V] of nodes [B, Q, H], with no stop tokens where it is too early for them."""
        logits = self.target.logits(hidden)
        mask_stops(logits, positions, self.state.stop_tokens, self.state.stops_from, slots=slots)
        return logits

    def _verify(self, logits: Tensor, tree: Tree, width: int, slots: Tensor, status: Tensor | None) -> Accepted:
        """The walks down the trees, as far as `width` nodes."""
        state, drawn_from = self.state, self.draft.drawn_from
        return verify_tree(
            logits,
            tree,
            width,
            slots=slots,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
            seeds=state.seeds,
            **(drawn_from._asdict() if drawn_from else {}),
            block_verification=drawn_from is not None,
            status=status,
        )

    def _goes_by_levels(self, batch: int, num_nodes: int) -> bool:
        """Whether reading the weight of the target's head once a level is less than multiplying all nodes by it. Drafts
        that were drawn are verified as a block, which asks for all logits."""
        return self.draft.drawn_from is None and batch * num_nodes > self.draft.accept_width * max(batch, CHEAP_ROWS)

    def _logits_by_levels(self, hidden: Tensor, tree: Tree, slots: Tensor) -> Tensor:
        """`_logits` of the nodes that the walks visit, computed when they get there; those of others mean nothing."""
        (batch, num_nodes), rows_of_all = hidden.shape[:2], hidden.flatten(0, 1)
        logits = hidden.new_empty(batch, num_nodes, self.target.lm_head.out_features)
        logits[..., 0] = 0  # a walk goes as far as a node without its logits: something is there to choose
        # torch copies rows number by number: 64 rows of a vocabulary take 51 us by 2 bytes.
        whole = torch.int64 if logits.shape[-1] * logits.itemsize % 8 == 0 else logits.dtype
        out = logits.flatten(0, 1).view(whole)
        roots = torch.arange(0, batch * num_nodes, num_nodes, device=hidden.device)
        nodes = roots
        for depth in range(min(self.draft.accept_width, num_nodes)):
            if depth > 0:  # where a walk has ended, its last node again
                nodes = roots + self._verify(logits, tree, depth + 1, slots, None).path[:, depth]
            positions = tree.positions.flatten()[nodes][:, None]
            out[nodes] = self._logits(rows_of_all[nodes][:, None], positions, slots)[:, 0].view(whole)
        return logits
