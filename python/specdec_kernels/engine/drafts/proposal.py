"""Values that pass between a draft and a round: the proposal, and what was committed of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...ops import Accepted, Candidates, Tree, build_tree, build_tree_from_parents
from .context import DraftContext, DraftState

Propose = TypeVar("Propose", bound=Callable[..., Any])
NOT_A_PARENT = -2  # build_tree omits a candidate with this parent, and sets BAD_TREE


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
        drafts: candidates [B, C], of any number, from which the tree takes the best; or the tree itself, of at most
            `DraftBudget.num_nodes` nodes, with the slot's root at node 0. Its links and mask are built again from its
            parents. A request ends with BAD_TREE if its tree has another root or other positions, or if a token scored
            above -inf is not one of the target's vocabulary.
        drawn_from: what the candidates of requests that sample were drawn from; None: they were chosen.
        note: anything the draft wants to find again in `extend`.
    """

    drafts: Candidates | ScoredTree
    drawn_from: DrawnFrom | None = None
    note: Any = None


class Committed(NamedTuple):
    """The result of a round's trees."""

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


def makes_valid_trees(propose: Propose) -> Propose:
    """Mark a draft's `propose`: each tree has its slot's root, and all tokens are the target's. It is not checked."""
    propose.makes_valid_trees = True  # type: ignore[attr-defined]
    return propose


def propose(draft: Any, slots: Tensor, budget: Any) -> Proposal:
    """Return what a draft proposes, with drafts that cannot change the text.

    Values are checked on the device, without waiting for it: a slot whose drafts are invalid gains BAD_TREE.

    Args:
        draft: a `Draft`.
        slots: [B] int32.
        budget: a `DraftBudget`.

    Raises:
        TypeError: its `propose` returns something else than a `Proposal` of candidates or trees.
        ValueError: drawn candidates of a draft that is not `sampled`. Its trees would be cut by the scores of drawn
            tokens, which biases the text. Trees of other shapes than the slots', or of more nodes than the budget's.
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
    if getattr(draft.propose, "makes_valid_trees", False):
        return proposal
    drafts, context = proposal.drafts, draft.context
    if isinstance(drafts, ScoredTree):
        return proposal._replace(drafts=valid_trees(drafts, slots, budget.num_nodes, context, method))
    return proposal._replace(drafts=without_foreign_tokens(drafts, context.vocab_size))


def without_foreign_tokens(candidates: Candidates, vocab_size: int) -> Candidates:
    """Return the candidates; `build_tree` refuses those that are no tokens of the vocabulary."""
    tokens, parents, _ = candidates
    if not isinstance(tokens, Tensor) or not isinstance(parents, Tensor) or tokens.shape != parents.shape:
        return candidates  # build_tree names what is wrong
    foreign = (tokens < 0) | (tokens >= vocab_size)
    return candidates._replace(parents=parents.masked_fill(foreign, NOT_A_PARENT))


def valid_trees(drafted: ScoredTree, slots: Tensor, num_nodes: int, context: DraftContext, method: str) -> ScoredTree:
    """Return trees built again from tokens and parents; a slot with an invalid one keeps its root and gains BAD_TREE.

    Raises:
        TypeError: no `Tree`.
        ValueError: other shapes than the slots', or more nodes than `num_nodes`.
    """
    tree, scores = drafted
    if not isinstance(tree, Tree):
        raise TypeError(f"{method} returned a tree of type {type(tree).__name__}, expected a Tree")
    batch, width = len(slots), tree.tokens.shape[-1] if tree.tokens.ndim else 0
    if not 1 <= width <= num_nodes:
        raise ValueError(f"{method} returned trees of {width} nodes, expected 1 to {num_nodes} (the budget)")
    parts = {f"tree.{name}": getattr(tree, name) for name in ("tokens", "parents", "positions")} | {"scores": scores}
    for name, part in parts.items():
        if part.shape != (batch, width):
            raise ValueError(f"{method} returned {name} of shape {list(part.shape)}, expected {[batch, width]}")
    if tree.num_nodes.shape != (batch,):
        raise ValueError(f"{method} returned tree.num_nodes of shape {list(tree.num_nodes.shape)}, expected {[batch]}")

    state, at = context.state, slots.clamp(min=0)
    roots, nodes = state.root_tokens[at], torch.arange(width, device=slots.device)
    foreign = (tree.tokens < 0) | (tree.tokens >= context.vocab_size)
    positions = tree.positions.gather(1, tree.parents.clamp(0, width - 1).long()) + 1
    positions = torch.where(nodes == 0, state.seq_lens[at][:, None], positions)
    wrong = (foreign | (tree.positions != positions)) & (nodes < tree.num_nodes[:, None])
    is_bad = wrong.any(1) | (tree.tokens[:, 0] != roots)
    rebuilt = build_tree_from_parents(
        torch.where(nodes == 0, roots[:, None], tree.tokens),
        tree.parents,
        state.seq_lens,
        num_nodes=tree.num_nodes.masked_fill(is_bad, 0),  # no number of nodes that a tree can have
        slots=slots,
        status=state.status,
    )
    return ScoredTree(rebuilt, scores.masked_fill(nodes >= rebuilt.num_nodes[:, None], -torch.inf))


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
