"""What passes between a draft and a round: what is proposed, and what the round made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import Accepted, Candidates, Tree, build_tree
from .context import DraftState


class ScoredTree(NamedTuple):
    """Trees with the log-probability of each node's path as its draft estimates it."""

    tree: Tree  # [B, N]
    scores: Tensor  # [B, N] float32: 0 for the root, -inf for unused nodes


class DrawnFrom(NamedTuple):
    """The distributions that a round's candidates were drawn from, as `verify_tree` takes them."""

    draft_logits: Tensor  # [B, Q, Vd]
    draft_rows: Tensor  # [B, N]
    id_map: Tensor | None  # [Vd]


class Proposal(NamedTuple):
    """All that a draft proposes for the slots of a round; `extend` receives it again.

    Scores are log-probabilities of paths: the sum, from the root down, of log p(token | text before it) as the draft
    estimates it. They are calibrated if of all nodes scored log p a share p is accepted. A tree chooses its nodes by
    them, and a union compares its drafts by them.

    Attributes:
        drafts: candidates [B, C], of any number, from which the tree takes the best; or the tree itself. A token scored
            above -inf is one of the target's vocabulary.
        drawn_from: what the candidates of requests that sample were drawn from; None: they were chosen.
        note: anything the draft wants to find again in `extend`.
    """

    drafts: Candidates | ScoredTree
    drawn_from: DrawnFrom | None = None
    note: Any = None


class Committed(NamedTuple):
    """What a round made of its trees."""

    accepted: Accepted  # all that was emitted, as `commit_tokens` left it
    num_valid: Tensor  # [B] int32: of these, what draft state follows; 0 where a row is empty, stalled or finished
    num_nodes: int  # most nodes that a tree of the round could have; no row has more tokens
    cu_seqlens: Tensor  # [B + 1] int32: the rows of request b's nodes, among those that the target ran
    tree: ScoredTree  # what was verified; to a member of a union its own tree, before the merge
    max_kv_len: int | None = None  # KV rows that no slot of the round exceeds
    idle: bool = False  # drafting did not pay: a draft that is `Idleable` may keep the round for `catch_up`


def no_candidates(slots: Tensor) -> Candidates:
    """Return candidates [B, 0], whose trees are their roots."""
    empty = slots.new_empty(len(slots), 0)
    return Candidates(empty, empty, empty.to(torch.float32))


def propose(draft: Any, slots: Tensor, budget: Any) -> Proposal:
    """Return what a draft proposes.

    Args:
        draft: a `Draft`.
        slots: [B] int32.
        budget: a `DraftBudget`.

    Raises:
        TypeError: its `propose` returns something else than a `Proposal` of candidates or trees.
        ValueError: drawn candidates of a draft that is not `sampled`. Its trees would be cut by the scores of drawn
            tokens, which biases the text.
    """
    proposal: Any = draft.propose(slots, budget)
    method = f"{type(draft).__name__}.propose"
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{method} returned a {type(proposal).__name__}, expected a Proposal")
    if not isinstance(proposal.drafts, Candidates | ScoredTree):
        kind = type(proposal.drafts).__name__
        raise TypeError(f"{method} returned drafts of type {kind}, expected Candidates or a ScoredTree")
    if proposal.drawn_from is not None and not draft.sampled:
        raise ValueError(f"{method} returned drawn_from, expected None of a draft whose `sampled` is False")
    return proposal


def scored_tree_of(drafts: Candidates | ScoredTree, slots: Tensor, num_nodes: int, state: DraftState) -> ScoredTree:
    """Return the trees of `num_nodes` nodes below the roots of slots [B], with the scores of their nodes."""
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
