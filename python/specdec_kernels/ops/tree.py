"""Tree ops: build, merge and pack token trees, and allocate a batch's verify budget to their nodes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .. import _C
from ._alloc import empty, shape_of, wrong_type
from ._tensor import Tensor
from .structs import Candidates, Tree, tree_outputs


def build_tree(
    candidates: Candidates,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_nodes: int,
    *,
    slots: Tensor | None = None,
    order: Literal["score", "given"] = "score",
    status: Tensor | None = None,
    out: Tree | None = None,
    out_scores: Tensor | None = None,
    stream: int | None = None,
) -> Tree:
    """Choose the best candidates of a draft and emit them as a tree, in one launch.

    Nodes 1, 2, ... are the best N - 1 candidates by score, ties to the lower candidate number. Scores never rise along
    a path and parents have lower numbers, so parents come before children and siblings stand best first; and a smaller
    N gives a prefix of the same tree. `order="given"` takes candidates in their own order instead, for a topology that
    was fixed before the draw. A score of -inf (or NaN) means no candidate, in both orders. A chain is k = 1.

    A candidate that scores above its parent, or whose parent is neither -1 nor a candidate with a lower number, is left
    out with its descendants, and sets Status BAD_TREE whether or not it would have been chosen.

    Args:
        candidates: as `expand_tree` leaves them; C may be 0.
        root_tokens, seq_lens: [num_slots] int32, the last emitted token and L.
        num_nodes: N, 1 to 256.
        slots: [B] int32.
        order: "score" or "given".
        status: [num_slots] int32, sticky bits.
        out_scores: [B, N] float32, written if it is given: the score of each node, 0 for the root, -inf where there is
            none.

    Returns:
        Tree; every element of it is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N or the order out of range.
    """
    if not isinstance(candidates, Candidates):
        raise wrong_type("build_tree", "candidates", candidates, Candidates)
    if out is None:
        out = tree_outputs("build_tree", "candidates.tokens", candidates.tokens, num_nodes)
    elif not isinstance(out, Tree):
        raise wrong_type("build_tree", "out", out, Tree)
    _C.build_tree(stream, *candidates, root_tokens, seq_lens, num_nodes, slots, order, status, *out, out_scores)
    return out


def build_tree_from_parents(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    out: Tree | None = None,
    stream: int | None = None,
) -> Tree:
    """Build a tree from parent pointers. Siblings may carry the same token.

    A row with a child before its parent, a second root, a parent out of range, or `num_nodes` outside 1 to N is
    refused: it becomes the root alone and sets Status BAD_TREE.

    Args:
        tokens: [B, N] int32, the root first, N from 1 to 256.
        parents: [B, N] int32, -1 for node 0 and a lower node for every other.
        seq_lens: [num_slots] int32, L.
        num_nodes: [B] int32, how many rows are nodes; None: all N. What lies behind is ignored.
        slots: [B] int32.
        status: [num_slots] int32, sticky bits.

    Returns:
        Tree; every element of it is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N out of range.
    """
    if out is None:
        out = tree_outputs("build_tree_from_parents", "tokens", tokens, None)
    elif not isinstance(out, Tree):
        raise wrong_type("build_tree_from_parents", "out", out, Tree)
    _C.build_tree_from_parents(stream, tokens, parents, seq_lens, num_nodes, slots, status, *out)
    return out


def build_tree_from_mask(
    tokens: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    out: Tree | None = None,
    stream: int | None = None,
) -> Tree:
    """Build a tree from an ancestor mask. Siblings may carry the same token.

    Each row must be its parent's row and its own bit, and row 0 bit 0 alone. A mask with a missing root or own bit, a
    bit above the diagonal, or a row that is not closed under ancestors, and `num_nodes` outside 1 to N, are refused:
    the row becomes the root alone and sets Status BAD_TREE.

    Args:
        tokens: [B, N] int32, the root first, N from 1 to 256.
        mask: [B, N, W] int64 bit patterns, bit j of row i: node j is i or an ancestor of i.
        seq_lens: [num_slots] int32, L.
        num_nodes: [B] int32, how many rows are nodes; None: all N. What lies behind is ignored.
        slots: [B] int32.
        status: [num_slots] int32, sticky bits.

    Returns:
        Tree; every element of it is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N out of range.
    """
    if out is None:
        out = tree_outputs("build_tree_from_mask", "tokens", tokens, None)
    elif not isinstance(out, Tree):
        raise wrong_type("build_tree_from_mask", "out", out, Tree)
    _C.build_tree_from_mask(stream, tokens, mask, seq_lens, num_nodes, slots, status, *out)
    return out


def merge_trees(
    a: Tree,
    a_scores: Tensor,
    b: Tree,
    b_scores: Tensor,
    num_nodes: int,
    *,
    out: tuple[Tree, Tensor] | None = None,
    stream: int | None = None,
) -> tuple[Tree, Tensor]:
    """Merge two drafts of the same requests (of an n-gram index and a model, say) and keep the best nodes.

    Nodes with the same tokens on their paths become one, with the better of their scores; a score above that of a node
    before it on the path counts as that one's. Nodes 1, 2, ... of the result are the best N - 1 by score, ties to `a`
    and then to the lower number, so that parents come before children, siblings stand best first, and a smaller N gives
    a prefix of the same tree.

    A node whose score is -inf or NaN, or whose parent is not an earlier node, is left out with its descendants. A row
    of `b` with another root than `a`'s is left out; where `a` has an empty row, it is all there is.

    Args:
        a, b: trees of [B, Na] and [B, Nb] nodes, 1 to 256 each; tokens, parents, num_nodes and the root's position
            are read.
        a_scores, b_scores: [B, Na] and [B, Nb] float32, log-probability of each node given the text before the tree;
            the root's is ignored.
        num_nodes: N, 1 to 256.

    Returns:
        Tree, and scores [B, N] float32: of each node, 0 for the root, -inf behind `num_nodes`.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N out of range.
    """
    op = "merge_trees"
    if not isinstance(a, Tree):
        raise wrong_type(op, "a", a, Tree)
    if not isinstance(b, Tree):
        raise wrong_type(op, "b", b, Tree)
    if out is None:
        tree = tree_outputs(op, "a_scores", a_scores, num_nodes)
        scores = empty(op, a_scores, tree.tokens.shape, "float32")
    else:
        tree, scores = out
        if not isinstance(tree, Tree):
            raise wrong_type(op, "out[0]", tree, Tree)
    _C.merge_trees(
        stream,
        a.tokens,
        a.parents,
        a.positions,
        a.num_nodes,
        a_scores,
        b.tokens,
        b.parents,
        b.positions,
        b.num_nodes,
        b_scores,
        num_nodes,
        *tree,
        scores,
    )
    return tree, scores


class NodeAllocation(NamedTuple):
    """What each request gets of a budget of rows for the whole batch."""

    num_nodes: Tensor  # [B] int32: nodes, from the first on, the root included; 0 for an empty row
    cu_seqlens: Tensor  # [B + 1] int32: request b has the packed rows cu_seqlens[b] to cu_seqlens[b + 1] - 1
    expected: Tensor  # [R] float32: tokens that a round of so many rows emits, by the scores
    cuts: Tensor  # [R] float32: the score of the worst node taken; inf where there are but roots, -inf where all are


def allocate_nodes(
    scores: Tensor,
    budget: int,
    *,
    slots: Tensor | None = None,
    max_nodes: Tensor | None = None,
    finish_reasons: Tensor | None = None,
    status: Tensor | None = None,
    budget_levels: Tensor | None = None,
    level_limits: Tensor | None = None,
    out: NodeAllocation | None = None,
    stream: int | None = None,
) -> NodeAllocation:
    """Which nodes of a batch are verified under one budget of rows: the likeliest of all requests' together.

    Every request that is there gets its root; the rest of the budget goes to the nodes with the best scores in the
    batch, ties to the lower request and then to the lower node. A score is the log-probability of a path, so it is
    what a node adds to the tokens that its round is expected to emit, and no other choice of as many nodes adds more.
    Nodes stand best first, so that what a request gets is the beginning of its list, and closed under ancestors:
    `build_tree` with order="score", `merge_trees` and `NgramIndex.draft` have them so, and `merge_trees` of a tree with
    itself orders any other.

    Args:
        scores: [B, N] float32, N from 1 to 256 and B * N at most 65536: of each request's nodes, never rising along a
            row; the root's is not read. -inf (and NaN) is no node, and what is above 0 counts as 0. A row that rises
            gets some number of nodes, the same on both devices.
        budget: rows of the batch, roots included, at least B.
        slots: [B] int32; where it is below 0 the row is empty and gets no node. None: row b is slot b.
        max_nodes: [num_slots] int32: nodes that a slot's request gets at most, the root included; 1 (and below) is the
            root alone. None: N.
        finish_reasons, status: [num_slots] int32: rows whose request has finished (not 0), or is stalled, are empty.
        budget_levels: [R] int32, other budgets, which `expected` and `cuts` report on. A level below the number of
            roots takes the roots. None: R is 0.
        level_limits: [R] int32: most nodes of any request at each level. None: N.

    Returns:
        NodeAllocation. Probabilities are summed in whole 2^-40, so that all of it is the same on both devices.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a budget below B; too many nodes; level_limits without
            budget_levels.
    """
    op = "allocate_nodes"
    if out is None:
        batch, _ = shape_of(op, "scores", scores, 2)
        count = 0 if budget_levels is None else shape_of(op, "budget_levels", budget_levels, 1)[0]
        out = NodeAllocation(
            num_nodes=empty(op, scores, (batch,), "int32"),
            cu_seqlens=empty(op, scores, (batch + 1,), "int32"),
            expected=empty(op, scores, (count,), "float32"),
            cuts=empty(op, scores, (count,), "float32"),
        )
    elif not isinstance(out, NodeAllocation):
        raise wrong_type(op, "out", out, NodeAllocation)
    _C.allocate_nodes(
        stream, scores, budget, slots, max_nodes, finish_reasons, status, budget_levels, level_limits, *out
    )
    return out


class PackedNodes(NamedTuple):
    """The nodes of a batch's trees as rows without gaps; rows behind the last request belong to nobody."""

    tokens: Tensor  # [M] int32, 0 for a row of nobody
    positions: Tensor  # [M] int32, 0 for a row of nobody
    mask: Tensor  # [M, W] int64 bit patterns, as in Tree; nothing for a row of nobody
    scores: Tensor  # [M] float32, -inf for a row of nobody


def pack_trees(
    tree: Tree,
    scores: Tensor,
    shares: NodeAllocation,
    num_rows: int,
    *,
    out: PackedNodes | None = None,
    stream: int | None = None,
) -> PackedNodes:
    """Cut each tree to its share of nodes, and list these as packed rows: request b's at `shares.cu_seqlens[b]` on.

    Args:
        tree: [B, N], changed in place: nodes beyond a request's share become unused ones, with no link to them.
            Parents come before children, so the first nodes of any tree are one.
        scores: [B, N] float32, of its nodes.
        shares: num_nodes and cu_seqlens are read; a request with more of them than nodes keeps those it has.
        num_rows: M, of the packed rows, at least `shares.cu_seqlens[B]`; what has no row in 0..M - 1 gets none.

    Returns:
        PackedNodes; every element of it is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_rows below 0.
    """
    op = "pack_trees"
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    if not isinstance(shares, NodeAllocation):
        raise wrong_type(op, "shares", shares, NodeAllocation)
    if out is None:
        words = shape_of(op, "tree.mask", tree.mask, 3)[2]
        rows = max(num_rows, 0)  # a bad number is for the op to name
        out = PackedNodes(
            tokens=empty(op, scores, (rows,), "int32"),
            positions=empty(op, scores, (rows,), "int32"),
            mask=empty(op, scores, (rows, words), "int64"),
            scores=empty(op, scores, (rows,), "float32"),
        )
    elif not isinstance(out, PackedNodes):
        raise wrong_type(op, "out", out, PackedNodes)
    _C.pack_trees(stream, *tree, scores, shares.num_nodes, shares.cu_seqlens, num_rows, *out)
    return out
