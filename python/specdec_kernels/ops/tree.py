"""Tree ops: build, merge and pack token trees, and divide a batch's row budget among them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .. import _C
from .._deprecated import takes_old_arguments
from ._alloc import empty, range_on_device, shape_of, wrong_type
from ._tensor import Tensor
from .structs import Candidates, Tree, tree_outputs


@takes_old_arguments
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
    """Build a tree from the best candidates of a draft, in one launch.

    Nodes 1, 2, ... are the best N - 1 candidates by score, ties to the lower candidate. Scores never increase along a
    path, so parents come before children and siblings are sorted best first; a smaller N gives a prefix of the same
    tree. `order="given"` takes candidates in their own order instead, for a topology that was fixed before sampling. A
    score of -inf (or NaN) means no candidate, in both orders. k = 1 gives a chain.

    A candidate that scores above its parent, or whose parent is neither -1 nor an earlier candidate, is omitted with
    its descendants, and sets BAD_TREE whether or not it would have been chosen.

    Args:
        candidates: as `expand_tree` leaves them; C may be 0.
        root_tokens: [num_slots] int32, the last emitted token of each slot.
        seq_lens: [num_slots] int32, L.
        num_nodes: N, 1 to 256.
        slots: [B] int32.
        order: "score" or "given".
        status: [num_slots] int32. Gains BAD_TREE.
        out: preallocated result.
        out_scores: [B, N] float32, written if given: the score of each node, 0 for the root, -inf after num_nodes.
        stream: CUDA stream; None: the current one.

    Returns:
        Tree; every element is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_nodes or order out of range.
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
    """Build a tree from parent indices. Siblings may have the same token.

    A row is malformed if a child precedes its parent, if it has a second root or a parent out of range, or if
    `num_nodes` is outside 1 to N. It becomes the root alone and sets BAD_TREE.

    Args:
        tokens: [B, N] int32, the root first, N from 1 to 256.
        parents: [B, N] int32, -1 for node 0 and an earlier node for every other.
        seq_lens: [num_slots] int32, L.
        num_nodes: [B] int32, nodes of each row; later entries are ignored. None: all N.
        slots: [B] int32.
        status: [num_slots] int32. Gains BAD_TREE.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        Tree; every element is written.

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
    """Build a tree from an ancestor mask. Siblings may have the same token.

    Mask row 0 must be bit 0 alone, and every other row its parent's row and its own bit. A row of the batch is
    malformed if its mask lacks a root or own bit, has a bit above the diagonal, or is not closed under ancestors, or if
    `num_nodes` is outside 1 to N. It becomes the root alone and sets BAD_TREE.

    Args:
        tokens: [B, N] int32, the root first, N from 1 to 256.
        mask: [B, N, W] int64 bit patterns, bit j of row i: node j is i or an ancestor of i.
        seq_lens: [num_slots] int32, L.
        num_nodes: [B] int32, nodes of each row; later entries are ignored. None: all N.
        slots: [B] int32.
        status: [num_slots] int32. Gains BAD_TREE.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        Tree; every element is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N out of range.
    """
    if out is None:
        out = tree_outputs("build_tree_from_mask", "tokens", tokens, None)
    elif not isinstance(out, Tree):
        raise wrong_type("build_tree_from_mask", "out", out, Tree)
    _C.build_tree_from_mask(stream, tokens, mask, seq_lens, num_nodes, slots, status, *out)
    return out


@takes_old_arguments
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
    """Merge two drafts of the same requests (such as an n-gram index's and a model's) and keep the best nodes.

    Nodes with equal paths of tokens become one, with the better score; a score above an ancestor's counts as the
    ancestor's. Nodes 1, 2, ... of the result are the best N - 1 by score, ties to `a` and then to the lower node, so
    parents come before children, siblings are sorted best first, and a smaller N gives a prefix of the same tree.

    A node whose score is -inf or NaN, or whose parent is not an earlier node, is omitted with its descendants. If the
    roots of `a` and `b` differ, the row of `b` is omitted; if the row of `a` is empty, the result is that of `b`.

    Args:
        a: tree of [B, Na] nodes, 1 to 256; tokens, parents, num_nodes and the root's position are read.
        a_scores: [B, Na] float32, log-probability of each node given the text before the tree; the root's is ignored.
        b: tree of [B, Nb] nodes, read like a.
        b_scores: [B, Nb] float32, like a_scores.
        num_nodes: N, 1 to 256.
        out: preallocated results.
        stream: CUDA stream; None: the current one.

    Returns:
        Tree, and scores [B, N] float32 of its nodes: 0 for the root, -inf after `num_nodes`.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_nodes out of range.
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
        stream, a.tokens, a.parents, a.positions, a.num_nodes, a_scores, b.tokens, b.parents, b.positions, b.num_nodes,
        b_scores, num_nodes, *tree, scores,
    )  # fmt: skip
    return tree, scores


class NodeAllocation(NamedTuple):
    """The nodes of each request under a budget of rows for the whole batch."""

    num_nodes: Tensor  # [B] int32: leading nodes, the root included; 0 for an empty row
    cu_seqlens: Tensor  # [B + 1] int32: request b has packed rows cu_seqlens[b] to cu_seqlens[b + 1] - 1
    expected: Tensor  # [R] float32: expected tokens of a round with each level's rows
    cuts: Tensor  # [R] float32: the worst selected score; inf if only roots fit, -inf if all nodes do


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
    """Divide a batch's budget of rows: verify the most likely nodes of all requests together.

    Every active request gets its root. The rest of the budget goes to the best scores of the whole batch, ties to the
    lower request and then to the lower node. A score is the log-probability of a path, so its exponential is what the
    node adds to the expected tokens of the round, and no other choice of as many nodes expects more. Nodes are sorted
    best first, so a request gets a prefix of its nodes, which is closed under ancestors. `build_tree` with
    order="score", `merge_trees` and `NgramIndex.draft` sort nodes this way; merging a tree with itself sorts any other.

    Args:
        scores: [B, N] float32, N from 1 to 256 and B * N at most 65536: of each request's nodes, never increasing along
            a row; the root's is not read. -inf (or NaN) means no node; above 0 counts as 0. An increasing row gets an
            arbitrary number of nodes, the same on CPU and GPU.
        budget: rows of the batch, roots included, at least B.
        slots: [B] int32. A row with a negative slot is empty and gets no node.
        max_nodes: [num_slots] int32: node limit of each slot's request, the root included; 1 (and below) is the root
            alone. None: N.
        finish_reasons: [num_slots] int32: rows of finished requests (not 0) are empty.
        status: [num_slots] int32: rows of stalled slots are empty.
        budget_levels: [R] int32, alternative budgets, which `expected` and `cuts` report on. A level below the number
            of roots counts as that number. None: R is 0.
        level_limits: [R] int32: node limit of every request at each level. None: N.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        NodeAllocation. Probabilities are summed as integer multiples of 2^-40, so results are equal on CPU and GPU.

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
    """The nodes of a batch's trees as consecutive rows; rows after the last request are unused."""

    tokens: Tensor  # [M] int32, 0 for an unused row
    positions: Tensor  # [M] int32, 0 for an unused row
    mask: Tensor  # [M, W] int64 bit patterns, as in Tree; 0 for an unused row
    scores: Tensor  # [M] float32, -inf for an unused row


@takes_old_arguments
def pack_trees(
    tree: Tree,
    scores: Tensor,
    allocation: NodeAllocation,
    num_rows: int,
    *,
    out: PackedNodes | None = None,
    stream: int | None = None,
) -> PackedNodes:
    """Truncate each tree to its allocated nodes, and write these as packed rows: request b's from `cu_seqlens[b]` on.

    Args:
        tree: [B, N], changed in place: nodes after the allocated ones become unused, and no link names them. Parents
            come before children, so the first nodes of any tree are a tree.
        scores: [B, N] float32, of its nodes.
        allocation: num_nodes and cu_seqlens are read; a request with fewer nodes than allocated keeps them all.
        num_rows: M, the packed rows, at least `cu_seqlens[B]`; nodes whose row is not in 0..M - 1 are omitted.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        PackedNodes; every element is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_rows below 0.
    """
    op = "pack_trees"
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    if not isinstance(allocation, NodeAllocation):
        raise wrong_type(op, "allocation", allocation, NodeAllocation)
    if out is None:
        words = shape_of(op, "tree.mask", tree.mask, 3)[2]
        rows = max(num_rows, 0)  # the op itself refuses a negative number
        out = PackedNodes(
            tokens=empty(op, scores, (rows,), "int32"),
            positions=empty(op, scores, (rows,), "int32"),
            mask=empty(op, scores, (rows, words), "int64"),
            scores=empty(op, scores, (rows,), "float32"),
        )
    elif not isinstance(out, PackedNodes):
        raise wrong_type(op, "out", out, PackedNodes)
    _C.pack_trees(stream, *tree, scores, allocation.num_nodes, allocation.cu_seqlens, num_rows, *out)
    return out


def pack_whole_trees(tree: Tree, *, num_rows: int | None = None) -> tuple[PackedNodes, Tensor]:
    """Write the nodes of trees of different sizes as packed rows, without scores: `pack_trees` of all nodes.

    Args:
        tree: [B, N]; num_nodes says how many nodes of each row are used.
        num_rows: M, the packed rows; nodes whose row is not in 0..M - 1 are omitted. None: B * N, which holds all.

    Returns:
        PackedNodes, whose scores are 0, and `cu_seqlens_q` [B + 1] int32 for the ops that take packed rows.

    Raises:
        TypeError: tree is no Tree.
        ValueError: what `pack_trees` refuses.
    """
    op = "pack_whole_trees"
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    batch, nodes = shape_of(op, "tree.tokens", tree.tokens, 2)
    ends = empty(op, tree.tokens, (batch + 1,), "int32")
    ends[0] = 0
    ends[1:] = tree.num_nodes.cumsum(0)
    scores = empty(op, tree.tokens, (batch, nodes), "float32")
    scores[...] = 0
    unused = scores[0, :0] if batch else scores.reshape(0)
    allocation = NodeAllocation(tree.num_nodes, ends, unused, unused)
    return pack_trees(tree, scores, allocation, batch * nodes if num_rows is None else num_rows), ends


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a dense mask into the bit patterns that ops take; `Tree.dense_mask` does the reverse.

    Args:
        mask: [..., N] bool, torch or NumPy: row i sees column j. No additive mask of 0 and -inf.

    Returns:
        [..., ceil(N / 64)] int64: bit j % 64 of word j // 64 is column j.

    Raises:
        ValueError: mask has another dtype than bool, or no dimension.
    """
    op = "pack_mask"
    if not str(mask.dtype).endswith("bool") or not mask.shape:
        raise ValueError(f"{op}: mask is {mask.dtype} of shape {list(mask.shape)}, expected bool of shape [..., N]")
    columns = mask.shape[-1]
    words = -(-columns // 64)
    bits = empty(op, mask, (*mask.shape[:-1], words * 64), "int64")
    bits[...] = 0
    bits[..., :columns] = mask
    shifted = bits.reshape(*mask.shape[:-1], words, 64) << range_on_device(mask, 64)
    return shifted.sum(-1)
