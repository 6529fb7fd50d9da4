"""What passes between a draft and a round: what is proposed, and what was made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import Accepted, Candidates, Tree, build_tree
from ..device.state import EngineState


class ScoredTree(NamedTuple):
    """A tree, and log p of each node's path as its draft estimates it: 0 for the root, -inf for unused nodes."""

    tree: Tree  # [B, N]
    scores: Tensor  # [B, N] float32


class DrawnFrom(NamedTuple):
    """What a round's candidates were drawn from, as `verify_tree` takes it."""

    draft_logits: Tensor  # [B, Q, Vd]
    draft_rows: Tensor  # [B, N]
    id_map: Tensor | None  # [Vd]


class Proposal(NamedTuple):
    """All that belongs to what a draft proposes for the slots of a round; `extend` receives it again.

    Scores are log-probabilities of paths: the sum, from the root down, of log p(token | text before it) as the draft
    estimates it. They are calibrated when of all nodes scored log p a share p is what the target says. By them a tree
    takes its nodes and a union compares its drafts.

    Attributes:
        drafts: candidates [B, C] in any number, of which the tree takes the best, or the tree itself. A token scored
            above -inf is one of the target's vocabulary.
        drawn_from: what the candidates of requests that sample were drawn from; None: they were chosen.
        note: whatever the draft wants to find again in `extend`.
    """

    drafts: Candidates | ScoredTree
    drawn_from: DrawnFrom | None = None
    note: Any = None


class Committed(NamedTuple):
    """What a round made of its trees."""

    accepted: Accepted  # all that was emitted, as `commit_tokens` left it
    num_valid: Tensor  # [B] int32: of these, what draft state follows; none of a row that is empty, stalled or finished
    num_nodes: int  # most nodes that a tree of the round could have; no row has more tokens
    cu_seqlens: Tensor  # [B + 1] int32: the rows of request b's nodes, among those that the target ran
    tree: ScoredTree  # what was verified; to a member of a union its own tree, before it was merged
    max_kv_len: int | None = None  # KV rows that no slot of the round exceeds


def no_candidates(slots: Tensor) -> Candidates:
    """[B, 0]: their trees are their roots."""
    empty = slots.new_empty(len(slots), 0)
    return Candidates(empty, empty, empty.to(torch.float32))


def scored_tree_of(drafts: Candidates | ScoredTree, slots: Tensor, num_nodes: int, state: EngineState) -> ScoredTree:
    """The trees of `num_nodes` nodes behind the roots of slots [B], with the scores of their nodes."""
    if isinstance(drafts, ScoredTree):
        return drafts
    scores = drafts.scores.new_empty(len(slots), num_nodes)
    tree = build_tree(
        drafts,
        state.root_tokens,
        state.seq_lens,
        num_nodes,
        slots=slots,
        status=state.status,
        out_scores=scores,
    )
    return ScoredTree(tree, scores)
