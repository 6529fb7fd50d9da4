"""One speculative round: draft, tree, target forward, verify, commit, draft-extend (docs/round.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM
from ..ops import Accepted, alloc_pages, commit_tokens, move_kv, verify_tree
from .drafts import Draft
from .state import SlotState


@dataclass(frozen=True)
class RoundResult:
    """Device tensors of one round's rows: what was committed, and how many nodes each tree had [B]."""

    accepted: Accepted
    num_nodes: Tensor


@dataclass(frozen=True)
class Round:
    target: CausalLM
    draft: Draft
    state: SlotState
    reserve: int

    @torch.inference_mode()
    def run(self, slots: Tensor) -> RoundResult:
        """Advance slots [B] by one round; nothing here reads a device value on the host, except n-gram drafting."""
        state, draft = self.state, self.draft
        alloc_pages(state.pool, state.seq_lens, self.reserve, slots=slots, status=state.status)

        tree = draft.propose(slots)
        rows = state.rows(slots, state.seq_lens, tail_len=draft.num_nodes, mask=tree.mask, num_valid=tree.num_nodes)
        hidden = self.target.forward(tree.tokens, tree.positions, rows)
        features = self.target.features()

        accepted = verify_tree(
            self.target.logits(hidden),
            tree,
            draft.accept_width,
            slots=slots,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
            seeds=state.seeds,
            status=state.status,
        )
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
        draft.extend(slots, accepted, num_valid, features)
        return RoundResult(accepted, tree.num_nodes)
