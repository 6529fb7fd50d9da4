"""The ops. One thin function each: allocate the outputs that were not passed, call the compiled op positionally.

Conventions: shapes are row-major and contiguous unless said; indices are int32; every op runs on the device of its
tensors (all the same), on the caller's current stream unless `stream=` names another, without synchronising, and is
legal inside a CUDA graph when its outputs are passed. Nothing is converted or copied for the caller: a wrong dtype,
shape, device or stride is a ValueError that names the argument. `requires_grad` is ignored.

Letters: B batch, N tree nodes, S accept row width, k topk, V vocabulary, W mask words (ceil(N / 64)).
`slots[B]` names the slot each row works for (-1: an empty row); None means row b is slot b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from . import _C
from ._alloc import arange_like, empty, empty_like, shape_of

if TYPE_CHECKING:
    Tensor: TypeAlias = Any  # anything that speaks DLPack


# --- draft ------------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor,
    k: int,
    *,
    id_map: Tensor | None = None,
    out_ids: Tensor | None = None,
    out_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-softmax and the k best of every row, in one pass over the logits.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf;
            entries of +inf share the whole probability.
        k: how many, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        out_ids [R, k] int32, best first, and out_logprobs [R, k] float32, never above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range.
    """
    if out_ids is None or out_logprobs is None:
        rows, _ = shape_of("select_topk", "logits", logits, 2)
        out_ids = empty("select_topk", logits, (rows, k), "int32") if out_ids is None else out_ids
        out_logprobs = empty("select_topk", logits, (rows, k), "float32") if out_logprobs is None else out_logprobs
    _C.select_topk(stream, logits, k, id_map, out_ids, out_logprobs)
    return out_ids, out_logprobs


def sample_draft(
    logits: Tensor,
    k: int,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    slots: Tensor | None = None,
    id_map: Tensor | None = None,
    out_ids: Tensor | None = None,
    out_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """k draws without replacement from softmax(logits / temperature) of every row, in draw order.

    Gumbel top-k (Kool et al., 2019, https://arxiv.org/abs/1903.06059). The noise of an entry depends on its request's
    seed, the position of the token drawn, the row's number among its request's and the entry's index alone: not on
    the batch, the slot or k, so fewer draws are a prefix of more. Rows of one request are independent: each depth of
    a tree is drawn in one call.

    A request of temperature 0 (or below, or NaN) is drawn greedily: as `select_topk`, log-probabilities included.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. R = B * Q: rows b * Q to b * Q + Q - 1 are
            request b's, such as the Q nodes of one depth of its tree. NaN counts as -inf; entries of +inf share the
            whole probability.
        k: how many draws from each row, 1 to min(Vd, 64).
        seeds: [num_slots] int64.
        positions: [R] int32, the absolute position of the token drawn.
        temperature: [num_slots] float32.
        slots: [B] int32; None: B = num_slots. An empty row has ids 0, log-probabilities -inf.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        out_ids [R, k] int32, in draw order, and out_logprobs [R, k] float32, never above 0: each token's
        log-probability in softmax(logits / temperature), before any draw. Where fewer than k entries have a
        probability, the lowest of the other indices follow, with -inf.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range; R no multiple of B.
    """
    if out_ids is None or out_logprobs is None:
        rows, _ = shape_of("sample_draft", "logits", logits, 2)
        out_ids = empty("sample_draft", logits, (rows, k), "int32") if out_ids is None else out_ids
        out_logprobs = empty("sample_draft", logits, (rows, k), "float32") if out_logprobs is None else out_logprobs
    _C.sample_draft(stream, logits, k, seeds, positions, temperature, slots, id_map, out_ids, out_logprobs)
    return out_ids, out_logprobs


class Candidates(NamedTuple):
    """Every token the draft proposed: k of step 1, then k * k of each later step; a parent has a lower number."""

    tokens: Tensor  # [B, C] int32, C = k + (num_steps - 1) * k * k
    parents: Tensor  # [B, C] int32 candidate numbers, -1: the root
    scores: Tensor  # [B, C] float32 cumulative log-probabilities, -inf where there is no candidate (yet)


class Frontier(NamedTuple):
    """The k nodes the draft is fed next, best first."""

    nodes: Tensor  # [B, k] int32 candidate numbers
    tokens: Tensor  # [B, k] int32
    positions: Tensor  # [B, k] int32
    mask: Tensor  # [B, k, Wd] int64 bit patterns, Wd = max(1, ceil(k * (num_steps - 1) / 64))


class ExtendRows(NamedTuple):
    """Rows of draft-extend, with W = min(S, num_nodes) for each request."""

    tokens: Tensor  # [B, W] int32, 0 where there is none
    positions: Tensor  # [B, W] int32
    node_rows: Tensor  # [B, W] int64, of B * num_nodes: the tree's node behind each row
    last_rows: Tensor  # [B] int64, of B * W: the last valid row of each request, or its first
    kept_slots: Tensor  # [B] int64: the slot whose draft state that row becomes; num_slots, where no row is valid


class DraftInputs(NamedTuple):
    """What the draft forward of an expanded frontier needs, beside its mask."""

    tokens: Tensor  # [B, k] int32
    parent_rows: Tensor  # [B, k] int32, rows of the [B * k] features of the frontier before
    positions: Tensor  # [B, k] int32


def expand_root(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    seq_lens: Tensor,
    num_steps: int,
    *,
    slots: Tensor | None = None,
    position_offset: int = 0,
    out_cand_tokens: Tensor | None = None,
    out_cand_parents: Tensor | None = None,
    out_cand_scores: Tensor | None = None,
    out_frontier: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_mask: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Candidates, Frontier]:
    """Draft step 1: the root's children, kept per slot, become candidates 0 to k - 1 and the first frontier.

    Frontier node j of depth s is the draft's tail row (s - 1) * k + j; bit r of its mask says that tail row r is an
    ancestor or the node itself. Columns that later steps fill hold token 0, parent -1, score -inf. An empty row has
    that in every column, tokens and positions 0.

    Args:
        topk_ids, topk_logprobs: [num_slots, k] int32 and float32, k from 1 to 64; NaN counts as -inf.
        seq_lens: [num_slots] int32, L.
        num_steps: depth of drafting, 1 to 1024.
        slots: [B] int32; None: B = num_slots.
        position_offset: depth d is rotated at L + d - 1 + position_offset: 0 for EAGLE heads, 1 for a standalone draft.

    Returns:
        Candidates and Frontier; every element of each is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "expand_root"
    batch, k = shape_of(op, "topk_ids", topk_ids, 2)
    if slots is not None:
        (batch,) = shape_of(op, "slots", slots, 1)
    later = max(num_steps - 1, 0)
    columns = (batch, k + later * k * k)
    if out_cand_tokens is None:
        out_cand_tokens = empty(op, topk_ids, columns, "int32")
    if out_cand_parents is None:
        out_cand_parents = empty(op, topk_ids, columns, "int32")
    if out_cand_scores is None:
        out_cand_scores = empty(op, topk_ids, columns, "float32")
    if out_frontier is None:
        out_frontier = empty(op, topk_ids, (batch, k), "int32")
    if out_tokens is None:
        out_tokens = empty(op, topk_ids, (batch, k), "int32")
    if out_positions is None:
        out_positions = empty(op, topk_ids, (batch, k), "int32")
    if out_mask is None:
        out_mask = empty(op, topk_ids, (batch, k, max(1, -(-k * later // 64))), "int64")
    _C.expand_root(
        stream,
        topk_ids,
        topk_logprobs,
        seq_lens,
        num_steps,
        slots,
        position_offset,
        out_cand_tokens,
        out_cand_parents,
        out_cand_scores,
        out_frontier,
        out_tokens,
        out_positions,
        out_mask,
    )
    return (
        Candidates(out_cand_tokens, out_cand_parents, out_cand_scores),
        Frontier(out_frontier, out_tokens, out_positions, out_mask),
    )


def expand_tree(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    step: int,
    cand_tokens: Tensor,
    cand_parents: Tensor,
    cand_scores: Tensor,
    frontier: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    *,
    slots: Tensor | None = None,
    position_offset: int = 0,
    out_tokens: Tensor | None = None,
    out_parent_rows: Tensor | None = None,
    out_positions: Tensor | None = None,
    stream: int | None = None,
) -> DraftInputs:
    """A later draft step: append the frontier's k * k children, keep the best k of them as the next frontier.

    `cand_tokens`, `cand_parents`, `cand_scores`, `frontier` and `mask` are updated in place: with what `expand_root`
    returned, `expand_tree(ids, logprobs, 2, *candidates, frontier.nodes, frontier.mask, seq_lens)`.

    Child i of frontier node j is candidate k + (step - 2) * k * k + j * k + i. Its score is its parent's plus its
    log-probability, and never above its parent's. The new frontier is ordered by score, ties to the lower number;
    children of score -inf fill it where there is nothing better. Its masks are the parents' with the own bit
    (step - 1) * k + j; the last step's nodes are fed to no draft, and have theirs only where it fits in Wd words.

    Args:
        topk_ids, topk_logprobs: [B, k, k] int32 and float32, the children of each frontier node; NaN counts as -inf.
        step: depth of the children, 2 to num_steps.
        cand_tokens, cand_parents, cand_scores: [B, C] int32, int32, float32.
        frontier: [B, k] int32. A number that is no candidate yet has children of score -inf and parent -1.
        mask: [B, k, Wd] int64.
        seq_lens: [num_slots] int32, L.
        slots: [B] int32. An empty row appends token 0, parent -1, score -inf; its tokens and positions are 0.
        position_offset: as in `expand_root`.

    Returns:
        DraftInputs of the new frontier.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "expand_tree"
    if out_tokens is None or out_parent_rows is None or out_positions is None:
        batch, k, _ = shape_of(op, "topk_ids", topk_ids, 3)
        out_tokens = empty(op, topk_ids, (batch, k), "int32") if out_tokens is None else out_tokens
        out_parent_rows = empty(op, topk_ids, (batch, k), "int32") if out_parent_rows is None else out_parent_rows
        out_positions = empty(op, topk_ids, (batch, k), "int32") if out_positions is None else out_positions
    _C.expand_tree(
        stream,
        topk_ids,
        topk_logprobs,
        step,
        cand_tokens,
        cand_parents,
        cand_scores,
        frontier,
        mask,
        seq_lens,
        slots,
        position_offset,
        out_tokens,
        out_parent_rows,
        out_positions,
    )
    return DraftInputs(out_tokens, out_parent_rows, out_positions)


def extend_rows(
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    seq_lens_before: Tensor,
    num_nodes: int,
    *,
    slots: Tensor | None = None,
    position_offset: int = 0,
    out_tokens: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_node_rows: Tensor | None = None,
    out_last_rows: Tensor | None = None,
    out_kept_slots: Tensor | None = None,
    stream: int | None = None,
) -> ExtendRows:
    """What draft-extend runs on: the tokens a round accepted, as rows of a forward pass of the draft.

    Args:
        tokens, path: [B, S] int32, as `commit_tokens` left them.
        num_valid: [B] int32: rows that count.
        seq_lens_before: [num_slots] int32, L before the round.
        num_nodes: N of the trees that `path` is of; no request has more tokens than nodes.
        slots: [B] int32. An empty row keeps nothing, and its positions count from 0.
        position_offset: of row 0 beyond L.

    Returns:
        ExtendRows.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "extend_rows"
    batch, accept_width = shape_of(op, "tokens", tokens, 2)
    each, once = (batch, min(accept_width, num_nodes)), (batch,)
    out_tokens = empty(op, tokens, each, "int32") if out_tokens is None else out_tokens
    out_positions = empty(op, tokens, each, "int32") if out_positions is None else out_positions
    out_node_rows = empty(op, tokens, each, "int64") if out_node_rows is None else out_node_rows
    out_last_rows = empty(op, tokens, once, "int64") if out_last_rows is None else out_last_rows
    out_kept_slots = empty(op, tokens, once, "int64") if out_kept_slots is None else out_kept_slots
    outputs = ExtendRows(out_tokens, out_positions, out_node_rows, out_last_rows, out_kept_slots)
    _C.extend_rows(stream, tokens, path, num_valid, seq_lens_before, num_nodes, slots, position_offset, *outputs)
    return outputs


# --- tree -------------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A token tree per row: node 0 is the root, parents come before children, N from 1 to 256.

    Rows of a tree beyond its `num_nodes` carry the root's token, position L, their own mask bit, and -1 elsewhere. An
    empty row has no nodes; its tokens and positions are 0.
    """

    tokens: Tensor  # [B, N] int32
    parents: Tensor  # [B, N] int32, -1: none
    positions: Tensor  # [B, N] int32, L + depth
    first_child: Tensor  # [B, N] int32, the lowest-numbered child, -1: none
    next_sibling: Tensor  # [B, N] int32, the next node with the same parent, -1: none
    mask: Tensor  # [B, N, W] int64 bit patterns: bit j of row i, node j is i or an ancestor of i
    num_nodes: Tensor  # [B] int32, including the root


def _tree_outputs(
    op: str, name: str, like: Tensor, nodes: int | None, passed: tuple[Tensor | None, ...], ndim: int = 2
) -> Tree:
    """What was passed, completed: rows as many as `like` has, of `nodes` nodes (None: as `like`)."""
    for out in passed:
        if out is None:
            break
    else:
        return Tree(*passed)
    batch, *columns = shape_of(op, name, like, ndim)
    nodes = max(columns[0] if nodes is None else nodes, 0)  # the op itself refuses a number out of range
    row = (batch, nodes)
    shapes = (row, row, row, row, row, (batch, nodes, (nodes + 63) // 64), (batch,))
    dtypes = ("int32",) * 5 + ("int64", "int32")
    return Tree(
        *(
            empty(op, like, shape, dtype) if out is None else out
            for out, shape, dtype in zip(passed, shapes, dtypes, strict=True)
        )
    )


def build_tree(
    cand_tokens: Tensor,
    cand_parents: Tensor,
    cand_scores: Tensor,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int,
    *,
    slots: Tensor | None = None,
    order: Literal["score", "given"] = "score",
    status: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_parents: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_first_child: Tensor | None = None,
    out_next_sibling: Tensor | None = None,
    out_mask: Tensor | None = None,
    out_num_nodes: Tensor | None = None,
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
        cand_tokens, cand_parents, cand_scores: [B, C] int32, int32, float32, as from `expand_tree`; C may be 0.
        root_tokens, seq_lens: [num_slots] int32, the last emitted token and L.
        num_draft_tokens: N, 1 to 256.
        slots: [B] int32.
        order: "score" or "given".
        status: [num_slots] int32, sticky bits.

    Returns:
        Tree; every element of it is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N or the order out of range.
    """
    passed = (out_tokens, out_parents, out_positions, out_first_child, out_next_sibling, out_mask, out_num_nodes)
    tree = _tree_outputs("build_tree", "cand_tokens", cand_tokens, num_draft_tokens, passed)
    _C.build_tree(
        stream,
        cand_tokens,
        cand_parents,
        cand_scores,
        root_tokens,
        seq_lens,
        num_draft_tokens,
        slots,
        order,
        status,
        *tree,
    )
    return tree


def build_tree_from_parents(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_parents: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_first_child: Tensor | None = None,
    out_next_sibling: Tensor | None = None,
    out_mask: Tensor | None = None,
    out_num_nodes: Tensor | None = None,
    stream: int | None = None,
) -> Tree:
    """A tree that comes from elsewhere as parent pointers. Siblings may carry the same token.

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
    passed = (out_tokens, out_parents, out_positions, out_first_child, out_next_sibling, out_mask, out_num_nodes)
    tree = _tree_outputs("build_tree_from_parents", "tokens", tokens, None, passed)
    _C.build_tree_from_parents(stream, tokens, parents, seq_lens, num_nodes, slots, status, *tree)
    return tree


def build_tree_from_mask(
    tokens: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_parents: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_first_child: Tensor | None = None,
    out_next_sibling: Tensor | None = None,
    out_mask: Tensor | None = None,
    out_num_nodes: Tensor | None = None,
    stream: int | None = None,
) -> Tree:
    """A tree that comes from elsewhere as an ancestor mask. Siblings may carry the same token.

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
    passed = (out_tokens, out_parents, out_positions, out_first_child, out_next_sibling, out_mask, out_num_nodes)
    tree = _tree_outputs("build_tree_from_mask", "tokens", tokens, None, passed)
    _C.build_tree_from_mask(stream, tokens, mask, seq_lens, num_nodes, slots, status, *tree)
    return tree


def merge_trees(
    a: Tree,
    a_scores: Tensor,
    b: Tree,
    b_scores: Tensor,
    num_draft_tokens: int,
    *,
    out_tokens: Tensor | None = None,
    out_parents: Tensor | None = None,
    out_positions: Tensor | None = None,
    out_first_child: Tensor | None = None,
    out_next_sibling: Tensor | None = None,
    out_mask: Tensor | None = None,
    out_num_nodes: Tensor | None = None,
    out_scores: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tree, Tensor]:
    """The union of two drafts of the same requests, cut to its best nodes: the n-gram index's and a model's, say.

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
        num_draft_tokens: N, 1 to 256.

    Returns:
        Tree, and out_scores [B, N] float32: of each node, 0 for the root, -inf behind `num_nodes`.

    Raises:
        ValueError: wrong dtype, shape, device or stride; N out of range.
    """
    passed = (out_tokens, out_parents, out_positions, out_first_child, out_next_sibling, out_mask, out_num_nodes)
    tree = _tree_outputs("merge_trees", "a_scores", a_scores, num_draft_tokens, passed)
    if out_scores is None:
        batch, _ = shape_of("merge_trees", "a_scores", a_scores, 2)
        out_scores = empty("merge_trees", a_scores, (batch, max(num_draft_tokens, 0)), "float32")
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
        num_draft_tokens,
        *tree,
        out_scores,
    )
    return tree, out_scores


# --- layers -----------------------------------------------------------------------------------------------------------


def norm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out_sum: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row over its root mean square, times a weight; with `residual`, of the sum of both.

    Sums and products are float32; what is normalised is the sum as it is stored.

    Args:
        x: [T, H] float32, float16 or bfloat16; rows may be strided, here and below.
        weight: [H] of the same dtype.
        eps: added to the mean square, above 0.
        residual: [T, H] like x, added to it.

    Returns:
        out [T, H], and x + residual in out_sum [T, H], which may be x or residual; without a residual, x itself.

    Raises:
        ValueError: wrong dtype, shape, device or stride; out_sum without a residual.
    """
    if out is None:
        out = empty_like("norm_rows", x, shape_of("norm_rows", "x", x, 2))
    if residual is not None and out_sum is None:
        out_sum = empty_like("norm_rows", x, shape_of("norm_rows", "x", x, 2))
    _C.norm_rows(stream, x, weight, eps, residual, out_sum, out)
    return out, x if residual is None else out_sum


def pair_rows(
    embeddings: Tensor,
    tokens: Tensor,
    embedding_weight: Tensor,
    features: Tensor,
    feature_weight: Tensor,
    eps: float,
    *,
    feature_rows: Tensor | None = None,
    out: Tensor | None = None,
    out_features: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What an EAGLE-3 layer reads: the embeddings of tokens beside a feature each, both over their root mean squares.

    Args:
        embeddings: [V, H] float32, float16 or bfloat16; rows may be strided, here and below.
        tokens: [T] int32. A number outside a table, here and below, takes its nearest row.
        features: [F, H] like embeddings.
        feature_rows: [T] int32, the feature of each row; None: feature i is row i's, and F is T or more.
        embedding_weight, feature_weight: [H] of the same dtype, of the norms.
        eps: of both norms, above 0.

    Returns:
        out [T, 2 * H], embeddings first, and out_features [T, H], the features of the rows as they were.

    Raises:
        ValueError: wrong dtype, shape, device or stride; an empty table.
    """
    if out is None or out_features is None:
        (rows,) = shape_of("pair_rows", "tokens", tokens, 1)
        _, width = shape_of("pair_rows", "embeddings", embeddings, 2)
        out = empty_like("pair_rows", embeddings, (rows, 2 * width)) if out is None else out
        out_features = empty_like("pair_rows", embeddings, (rows, width)) if out_features is None else out_features
    _C.pair_rows(
        stream,
        embeddings,
        tokens,
        embedding_weight,
        features,
        feature_rows,
        feature_weight,
        eps,
        out,
        out_features,
    )
    return out, out_features


def gate_rows(x: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """silu(gate) * up of rows that hold both side by side, in float32, rounded once.

    Args:
        x: [T, 2 * I] float32, float16 or bfloat16: gate, then up; rows may be strided.

    Returns:
        out [T, I].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, width = shape_of("gate_rows", "x", x, 2)
        out = empty_like("gate_rows", x, (rows, width // 2))
    _C.gate_rows(stream, x, out)
    return out


def linear_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Rows times a weight: `x @ weight.T + bias`, summed in float32, a few at the speed of reading the weight.

    The bits of a row do not depend on what is beside it, nor on how much, up to 128 rows and from 129 on (a sum may be
    cut otherwise there). On Hopper and later the op reads `weight` before the kernel launched before it on the stream
    has finished, which must therefore not be what writes it.

    Args:
        x: [M, K] float16 or bfloat16, at most 262144 rows, K a multiple of 64.
        weight: [N, K]; rows of both may be strided, and start on 16 bytes. Gated: [2 * N, K], those of the gate and
            then of up, N a multiple of 8.
        bias: of as many numbers and of the same dtype; None for none.
        gated: return silu(gate) * up, as `gate_rows` would, rounded once.

    Returns:
        out [M, N].

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many rows; rows off 16 bytes.
    """
    if out is None:
        rows, _ = shape_of("linear_rows", "x", x, 2)
        outs = shape_of("linear_rows", "weight", weight, 2)[0]
        out = empty_like("linear_rows", x, (rows, outs // 2 if gated else outs))
    _C.linear_rows(stream, x, weight, bias, gated, out)
    return out


def rotate_qkv(
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start_lens: Tensor,
    *,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    page_refs: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    status: Tensor | None = None,
    out_q: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """What stands between a layer's query-key-value product and its attention, in one pass: query and key heads are
    normalised and rotated, and keys and values are written to the slots' pages as `write_kv` writes them.

    Args:
        qkv: [B, Q, Hq + 2 * Hkv, D] float32, float16 or bfloat16, D 64, 128 or 256: query, key and value heads of every
            row; free strides except the last.
        rotations: [num_positions, D] float32: for each position the cosines of D / 2 angles, then their sines. Number d
            of a head is rotated with number d + D / 2, as Hugging Face models have it.
        positions: [B, Q] int32; one outside the table takes the nearest there is.
        k_pool, v_pool, page_table, start_lens, row_offset, num_valid, page_refs, k_scale, v_scale, status: those of
            `write_kv`, whose rows are padded here. Queries are computed for every row.
        q_norm, k_norm: [D] of qkv's dtype, weights of a root mean square norm of each head; None for none.
        eps: of both norms, above 0.

    Returns:
        out_q [B, Q, Hq, D].

    Raises:
        ValueError: wrong dtype, shape, device or stride; a scale that `write_kv` refuses.
    """
    if out_q is None:
        batch, q_len, heads, head_dim = shape_of("rotate_qkv", "qkv", qkv, 4)
        kv_heads = shape_of("rotate_qkv", "k_pool", k_pool, 4)[2]
        out_q = empty_like("rotate_qkv", qkv, (batch, q_len, max(heads - 2 * kv_heads, 0), head_dim))
    _C.rotate_qkv(
        stream,
        qkv,
        rotations,
        positions,
        k_pool,
        v_pool,
        page_table,
        start_lens,
        row_offset,
        slots,
        num_valid,
        q_norm,
        k_norm,
        eps,
        page_refs,
        k_scale,
        v_scale,
        status,
        out_q,
    )
    return out_q


# --- attention --------------------------------------------------------------------------------------------------------


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    slots: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    tail_len: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    fixed_split: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Attention of each request's query rows over its paged KV: a prefix all rows see, then a tail seen by mask.

    The KV of the request in slot s: rows [0, prefix_lens[s]) are visible to every query row, the `tail_len` rows behind
    them by `mask`. Verification has the tree nodes as queries and tail; draft decoding has the frontier as queries and
    all drafted nodes as tail; a prefill chunk is a causal chain. Lengths and tables are read on the device, so one
    captured call serves every length that the page table has room for.

    A query row with nothing to see, one at or beyond q_lens[b], of an empty or stalled slot, or behind the last packed
    request gives zeros (lse -inf), never NaN. KV rows that no query row of the request sees never touch a result,
    whatever they hold. On the CPU, and where no tensor cores are used (float32, rows off 16 bytes), that holds row by
    row; on tensor cores a NaN in a row seen by one query row may reach others of its request.

    Equal calls give equal bits. On the CPU and without tensor cores a row's result depends on its own request alone. On
    tensor cores KV is cut into parts by the size of the whole batch; with `fixed_split` at fixed rows instead, and then
    too a row's bits depend on neither the other requests nor the number of query rows beside it.

    Args:
        q: [B, Q, Hq, D] padded, or [T, Hq, D] packed with cu_seqlens_q; float32, float16 or bfloat16, D 64, 128 or 256;
            any strides but a contiguous last dimension (a transposed view is fine). Tensor cores need 16-bit floats and
            rows of q, out and the pools that start on 16 bytes.
        k_pool, v_pool: [P, page_size, Hkv, D] of q's dtype or float8_e4m3fn, any strides but the last; Hkv divides Hq.
        page_table: [num_slots, max_pages] int32; entries behind a request's length, or wholly before the window of all
            its query rows, are never used.
        prefix_lens: [num_slots] int32.
        slots: [B] int32.
        q_lens: [B] int32, valid query rows of each request (padded q only); None means Q.
        cu_seqlens_q: [B + 1] int32, request b's rows are cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; starts at 0.
        tail_len: rows of the tail; None means each request's number of valid query rows.
        mask: [B, Q, W] or packed [T, W] int64 as 64-bit patterns, bit j of word w: tail row 64 w + j is visible. None
            is a causal chain: query row i sees tail rows j <= i + tail_len - (rows of the request, Q when padded).
        scale: factor of the scores, above 0; 1 / sqrt(D) by default.
        window: sliding window, 1 or more: of its path, the prefix and then the tail rows visible to it (its own among
            them), a query row sees the last `window` rows. None means all.
        soft_cap: scores, scaled, become soft_cap * tanh(score / soft_cap). None means they stay as they are.
        k_scale, v_scale: what a number 1.0 in float8_e4m3fn pools stands for; 1 for other pools.
        fixed_split: cut long KV at multiples of this many rows, a multiple of 128, instead of into even parts of the
            whole batch's KV: batch-invariant, and slower where few cuts leave multiprocessors idle. The workspace grows
            with the page table's rows over fixed_split; 1024 to 4096 is reasonable. No effect on the CPU.
        out: as q, any strides but the last; written.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        workspace: [tree_attention_workspace(...) or more] float32, contents of no meaning before and after; allocated
            when None. Calls that may run at the same time need one each. None is needed on the CPU.
        status: [num_slots] int32. STALLED is read. Bits are added: bad page where a needed table entry is no page (its
            rows are invisible), bad length where a length was out of range and clamped.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens beside cu_seqlens_q; window,
            soft_cap, a scale or fixed_split out of range; k_scale or v_scale for pools that are not float8_e4m3fn; a
            workspace too small.

    Source: Dao et al., FlashAttention (arXiv 2205.14135) and FlashAttention-2 (2307.08691), online softmax in tiles;
    Shah et al., FlashAttention-3 (2407.08608), on Hopper's tensor cores; Dao et al., Flash-Decoding (2023), KV cut into
    parts that are merged by their sums of exponentials; Miao et al., SpecInfer (2305.09781), tree attention.
    """
    if out is None:
        shape = shape_of("tree_attention", "q", q, 4 if cu_seqlens_q is None else 3)
        out = empty("tree_attention", q, shape, str(q.dtype).rsplit(".", 1)[-1])
    if workspace is None:
        floats = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split)
        workspace = empty("tree_attention", q, (floats,), "float32") if floats else None
    _C.tree_attention(
        stream, q, k_pool, v_pool, page_table, prefix_lens, slots, q_lens, cu_seqlens_q, tail_len, mask, scale, window,
        soft_cap, k_scale, v_scale, fixed_split, out, lse, workspace, status,
    )  # fmt: skip
    return out


def tree_attention_workspace(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    fixed_split: int | None = None,
) -> int:
    """How many floats of workspace `tree_attention` needs for tensors of these shapes, whatever the lengths.

    It is 0 on the CPU. Without fixed_split it depends on the GPU and on the number of query rows, but is bounded (some
    20 MB on an H200); an engine makes one workspace of the most that any of its calls needs.

    Args:
        q, k_pool, page_table, cu_seqlens_q, fixed_split: as for `tree_attention`; no element is read.

    Returns:
        The number of float32 elements.

    Raises:
        ValueError: wrong dtype, shape, device or stride; fixed_split is not a positive multiple of 128.
    """
    floats: int = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split)
    return floats


# --- verify -----------------------------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    """What a round's verification emits; rows of fixed width S with `lengths` of each in use."""

    tokens: Tensor  # [B, S] int32: accepted drafts, then the bonus token, then -1
    lengths: Tensor  # [B] int32
    path: Tensor  # [B, S] int32: the tree node whose logits gave each token (root first, rising), the last repeated


def verify_tree(
    logits: Tensor,
    tree: Tree,
    accept_width: int,
    *,
    slots: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    vocab_mask: Tensor | None = None,
    logit_bias: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    id_map: Tensor | None = None,
    block_verification: bool = False,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_len: Tensor | None = None,
    out_path: Tensor | None = None,
    stream: int | None = None,
) -> Accepted:
    """Keep the longest prefix of each tree that the target itself would have produced, and its own next token.

    From the root on, y is the target's token at the node. The first child that carries y is accepted and visited next;
    where none does, y is the bonus token and the walk ends. A walk of `accept_width` nodes ends with y as the bonus.
    Logits of nodes that are not visited change nothing.

    A request of temperature 0 is greedy: y is the argmax of the node's logits (NaN counts as -inf, ties go to the
    lowest id). Otherwise y is drawn from softmax(logits / temperature), cut to the `top_k` best tokens, of these to the
    best that reach `top_p` of their probability, and of these to tokens at least `min_p` as likely as the best one;
    tokens tied with the last one kept are kept. The draw depends on the logits, the seed and the absolute position of
    y alone, so that a request's text is the same with any draft, any tree or none (docs/verification.md). The draw is
    exact to 2^-40 of the likeliest token and the same on both devices. A batch mixes greedy and sampled requests.

    Candidates that were themselves sampled, without replacement, from softmax(draft_logits / draft_temperature) are
    verified by rejection: the children of a node are tried in order, each accepted with the probability that the target
    gives it over the draft's (what earlier rejections left of both); where all are rejected, the bonus comes from what
    is left of the target's distribution. This accepts more where the draft is good, and the text then depends on the
    drafts as well as on the seed. The tree's shape must be fixed before the draw and siblings stand in draw order:
    choosing among drawn candidates by their score biases the text. The drafts' noise must be independent of this op's.
    Greedy requests, and nodes whose children were not sampled, are verified as above, whatever the rest of the batch.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, free strides except the last: the target's logits of every node.
            N is at most 512 and V at most 2^22.
        tree: all of it is read but the mask. A row with num_nodes <= 0 is empty.
        accept_width: S, the width of the emitted rows: the deepest possible node + 1.
        temperature: [num_slots] float32; 0 (and below) is greedy. None: all requests are.
        top_k: [num_slots] int32; 0 (and below) is off.
        top_p: [num_slots] float32; 1 (and above) is off.
        min_p: [num_slots] float32; 0 (and below) is off.
        seeds: [num_slots] int64, given with temperature.
        vocab_mask: [B, N, ceil(V / 32)] int32 bit patterns: bit v % 32 of word v / 32 allows token v at the node.
        logit_bias: [num_slots, V] float32, rows may be strided: added to the logits first, for greedy requests too.
        draft_logits: [B, Q, Vd] like logits, with sampling parameters: what candidates were drawn from. Vd = V without
            id_map.
        draft_rows: [B, N] int32, given with draft_logits: the row of draft_logits[b] that a node was drawn from, the
            same for all children of one node; -1 for a node that was not sampled.
        draft_temperature: [num_slots] float32; where it is 0 (or below), no candidate counts as sampled. None: the
            request's temperature.
        id_map: [Vd] int32, the target's id of each of the draft's, each at most once; V is at most 2^20 then. A child
            that the draft cannot have drawn (not in id_map, of no probability, or like an earlier sibling) is skipped.
        block_verification: verify the chain of sampled nodes at the root as one block (Sun et al., arXiv 2403.10444),
            which accepts at least as much on average; from the first node on that has several children or one that was
            not sampled, the walk goes on as above. The drafts of a round must then be drawn with noise that no earlier
            round used.
        workspace: [8 * B * N or more] int64, contents of no meaning before and after; allocated when None. Calls that
            may run at the same time need one each.
        status: [num_slots] int32. Gains BAD_LOGITS where a row of logits has nothing above -inf (the walk ends without
            a bonus token: nothing at all is emitted when it is the root's), BAD_TREE where a link leaves the tree, does
            not rise or contradicts `parents`, siblings differ in their draft row or name none of draft_logits, or
            num_nodes exceeds N (the walk ends with a bonus token).

    Returns:
        Accepted(tokens, lengths, path). Empty rows: length 0, tokens -1, path 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; accept_width < 1; seeds missing, or parameters of sampling
            without temperature; draft_rows missing, or parameters of drafts without draft_logits; a workspace
            too small.
    """
    if workspace is None or out_tokens is None or out_len is None or out_path is None:
        batch, nodes, _ = shape_of("verify_tree", "logits", logits, 3)
        width = max(accept_width, 0)  # a bad width is for the op to name
        out_tokens = empty("verify_tree", logits, (batch, width), "int32") if out_tokens is None else out_tokens
        out_len = empty("verify_tree", logits, (batch,), "int32") if out_len is None else out_len
        out_path = empty("verify_tree", logits, (batch, width), "int32") if out_path is None else out_path
        workspace = empty("verify_tree", logits, (8 * batch * nodes,), "int64") if workspace is None else workspace
    _C.verify_tree(
        stream,
        logits,
        tree.tokens,
        tree.parents,
        tree.positions,
        tree.first_child,
        tree.next_sibling,
        tree.num_nodes,
        accept_width,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        vocab_mask,
        logit_bias,
        draft_logits,
        draft_rows,
        draft_temperature,
        id_map,
        block_verification,
        workspace,
        status,
        out_tokens,
        out_len,
        out_path,
    )
    return Accepted(out_tokens, out_len, out_path)


def mask_stops(
    logits: Tensor,
    positions: Tensor,
    stop_tokens: Tensor,
    stops_from: Tensor,
    *,
    slots: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Rule out stop tokens where it is too early for them, before `verify_tree`.

    A slot's stop tokens get logit -inf at every node whose next token would stand at a position before
    `stops_from[slot]`.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, free strides except the last, changed in place.
        positions: [B, N] int32, of the nodes' tokens.
        stop_tokens: [num_slots, M] int32; what is no token (-1) is none.
        stops_from: [num_slots] int32, the first position where a stop token may stand; 0 (and below): anywhere.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.mask_stops(stream, logits, positions, stop_tokens, stops_from, slots)


class TokenScores(NamedTuple):
    """Log-probabilities of emitted tokens, and of the best alternatives to each."""

    logprobs: Tensor  # [B, S] float32
    top_ids: Tensor  # [B, S, top_n] int32, best first
    top_logprobs: Tensor  # [B, S, top_n] float32


def score_tokens(
    logits: Tensor,
    path: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    top_n: int = 0,
    slots: Tensor | None = None,
    num_logprobs: Tensor | None = None,
    out_logprobs: Tensor | None = None,
    out_top_ids: Tensor | None = None,
    out_top_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> TokenScores:
    """What `verify_tree` emitted, scored: log-softmax of the raw logits that chose each token.

    Logits of other nodes are not read. A token beyond its row's length has log-probability -inf and ids -1, and so has
    one whose node or token is out of range, or whose request did not ask.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16; only the last dimension need be contiguous. NaN counts as -inf,
            entries of +inf share the whole probability.
        path: [B, S] int32, the node behind each token.
        tokens: [B, S] int32.
        lengths: [B] int32, tokens in use of each row.
        top_n: how many of the best entries of each token's logits to list, 0 to min(V, 64); ties to the lower id.
        num_logprobs: [num_slots] int32, how many of the top_n a slot wants, with ids -1 and -inf behind them; -1 (and
            below) if not even its tokens are to be scored. Then their logits are not read. None: all of all rows.

    Returns:
        TokenScores; every element of it is written, and none is above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; top_n out of range; slots without num_logprobs.
    """
    op = "score_tokens"
    batch, width = shape_of(op, "path", path, 2)
    if out_logprobs is None:
        out_logprobs = empty(op, logits, (batch, width), "float32")
    if out_top_ids is None:
        out_top_ids = empty(op, logits, (batch, width, max(top_n, 0)), "int32")
    if out_top_logprobs is None:
        out_top_logprobs = empty(op, logits, (batch, width, max(top_n, 0)), "float32")
    _C.score_tokens(
        stream, logits, path, tokens, lengths, top_n, slots, num_logprobs, out_logprobs, out_top_ids, out_top_logprobs
    )
    return TokenScores(out_logprobs, out_top_ids, out_top_logprobs)


def commit_tokens(
    out_tokens: Tensor,
    out_len: Tensor,
    stop_tokens: Tensor,
    remaining: Tensor,
    max_lens: Tensor,
    seq_lens: Tensor,
    seq_lens_before: Tensor,
    root_tokens: Tensor,
    finish_reasons: Tensor,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    out_num_valid: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Cut what `verify_tree` emitted at a stop token or a limit, and advance the slots by what is left.

    A row is cut at its first stop token, which stays as the last one; at `remaining` tokens; and where the sequence,
    root included, would outgrow `max_lens`. Then with L = seq_lens[slot]: seq_lens_before = L, seq_lens = L + out_len,
    root_tokens = the last token kept, remaining -= out_len. Where several reasons to finish coincide, STOP goes before
    LENGTH before CONTEXT. Empty rows, finished slots and stalled ones emit nothing and keep their state, except that
    seq_lens_before = seq_lens. A running slot with out_len = 0 does not advance. Slots of one call must be distinct.

    Args:
        out_tokens: [B, S] int32, changed in place: -1 behind the cut.
        out_len: [B] int32, changed in place.
        stop_tokens: [num_slots, M] int32, padded with -1; M may be 0.
        remaining: [num_slots] int32, changed in place: tokens the request may still emit.
        max_lens: [num_slots] int32: tokens the sequence may have, prompt and root included.
        seq_lens, seq_lens_before, root_tokens: [num_slots] int32, changed in place.
        finish_reasons: [num_slots] int32 of FinishReason, changed in place.
        status: [num_slots] int32. STALLED is read; gains BAD_LENGTH where out_len is not in 0..S or seq_lens is
            negative (such a row emits nothing).

    Returns:
        out_num_valid [B] int32: out_len where the slot goes on, else 0; what `move_kv` and draft-extend work on.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out_num_valid is None:
        batch, _ = shape_of("commit_tokens", "out_tokens", out_tokens, 2)
        out_num_valid = empty("commit_tokens", out_tokens, (batch,), "int32")
    _C.commit_tokens(
        stream,
        out_tokens,
        out_len,
        stop_tokens,
        remaining,
        max_lens,
        seq_lens,
        seq_lens_before,
        root_tokens,
        finish_reasons,
        slots,
        status,
        out_num_valid,
    )
    return out_num_valid


# --- kv ---------------------------------------------------------------------------------------------------------------


class PagePool(NamedTuple):
    """Which KV pages are free and which slot holds which, for every layer's pool alike. See `make_page_pool`."""

    page_table: Tensor  # [num_slots, max_pages] int32 page ids, -1 for none
    page_counts: Tensor  # [num_slots] int32: pages held, the first ones of the slot's row
    page_refs: Tensor  # [num_pages] int32: owners of each page, 0 when free
    free_stack: Tensor  # [num_pages] int32: free page ids, the next one to give away on top
    num_free: Tensor  # [1] int32: height of the stack
    page_size: int


def make_page_pool(num_pages: int, num_slots: int, max_pages: int, page_size: int, like: Tensor) -> PagePool:
    """A pool of `num_pages` free pages on the device of `like` (torch or NumPy), the lowest ids given away first.

    Args:
        num_pages: pages of the pool, shared by all slots.
        num_slots: rows of the page table.
        max_pages: width of a slot's page table: ceil((max_len + reserve) / page_size).
        page_size: KV rows of a page, at least 1.
        like: any tensor; says which library and device.

    Returns:
        A PagePool whose slots hold nothing.

    Raises:
        ValueError: page_size below 1.
        TypeError: `like` is of a library whose tensors cannot be allocated here.
    """
    op = "make_page_pool"
    if page_size < 1:
        raise ValueError(f"{op}: page_size is {page_size}, expected at least 1")

    def filled(shape: tuple[int, ...], value: Any) -> Tensor:
        tensor = empty(op, like, shape, "int32")
        tensor[...] = value
        return tensor

    return PagePool(
        page_table=filled((num_slots, max_pages), -1),
        page_counts=filled((num_slots,), 0),
        page_refs=filled((num_pages,), 0),
        free_stack=filled((num_pages,), arange_like(like, num_pages - 1, -1, -1)),
        num_free=filled((1,), num_pages),
        page_size=page_size,
    )


def alloc_pages(
    pool: PagePool,
    lens: Tensor,
    reserve: int,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Top each slot's page table up to the pages that `lens[slot] + reserve` rows need, row after row of `slots`.

    A slot that does not fit gets nothing and is stalled; later ones are still tried. A slot named twice is served once.

    Args:
        pool: changed in place.
        lens: [num_slots] int32, usually the sequence lengths.
        reserve: rows beyond them, at least 0.
        slots: [B] int32; None for all slots in order.
        status: [num_slots] int32. STALLED is set where the free pages do not suffice, cleared where they do. Gains
            BAD_LENGTH where lens is negative, where more than max_pages are wanted, or page_counts is not a count
            (such a slot gets nothing); BAD_PAGE where the stack held something else than a page.

    Raises:
        ValueError: wrong dtype, shape, device or stride; reserve < 0.
    """
    _C.alloc_pages(stream, pool, lens, reserve, slots, status)


def free_pages(
    pool: PagePool,
    keep_lens: Tensor,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Take back each slot's pages beyond the first `keep_lens[slot]` rows (0: all), row after row of `slots`.

    A page loses one owner and is free when it has none left. The last page goes first, so that the next `alloc_pages`
    gives the same pages in the same order.

    Args:
        pool: changed in place; entries given back become -1.
        keep_lens: [num_slots] int32; more rows than the slot holds keeps everything.
        slots: [B] int32; None for all slots in order.
        status: [num_slots] int32. Gains BAD_LENGTH where keep_lens is negative or page_counts is not a count (nothing
            is returned), BAD_PAGE where an entry is not a page or a page had no owner (it is skipped).

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.free_pages(stream, pool, keep_lens, slots, status)


def fork_pages(
    pool: PagePool,
    src_slots: Tensor,
    dst_slots: Tensor,
    lens: Tensor,
    *,
    status: Tensor | None = None,
    out_num_rows: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Give the empty slot `dst_slots[b]` the first `lens[dst]` rows of slot `src_slots[b]`: several samples of one
    prompt, or a prefix that requests have in common.

    Whole pages are shared: they gain an owner, and ops that are given `page_refs` write them no more. A partial page at
    the end becomes a page of the destination's own, whose rows `copy_kv` then copies, in the target's pools and in the
    draft's. Row after row of the call, except that sources are taken as they were before it: a slot that was empty then
    cannot be forked from. One source may have many destinations; a destination is served for the first row that names
    it. A row with an empty slot on either side is empty.

    A stalled fork may be tried again. Until it is made, the destination must not be named to `alloc_pages`, which would
    give it pages of its own.

    Args:
        pool: changed in place.
        src_slots: [B] int32, B at most 512.
        dst_slots: [B] int32.
        lens: [num_slots] int32, read at the destinations; usually the sequence lengths, which a fork has from its
            source.
        status: [num_slots] int32, of the destinations. STALLED is set where a partial page finds no free one (the
            destination stays empty), cleared where the fork is made. Gains BAD_LENGTH where the destination is not
            empty, lens is negative or needs more pages than the source holds (no fork is made); BAD_PAGE where an entry
            of the source is no page with an owner (the destination's entry stays missing), or the stack held something
            else than a page.
        out_num_rows: see Returns; allocated when None.

    Returns:
        out_num_rows [B] int32: rows of the partial page, which `copy_kv` has to copy; 0 where there are none, or no
        fork was made.

    Raises:
        ValueError: wrong dtype, shape, device or stride; more than 512 rows.
    """
    if out_num_rows is None:
        (batch,) = shape_of("fork_pages", "src_slots", src_slots, 1)
        out_num_rows = empty("fork_pages", src_slots, (batch,), "int32")
    _C.fork_pages(stream, pool, src_slots, dst_slots, lens, status, out_num_rows)
    return out_num_rows


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start_lens: Tensor,
    *,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_refs: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Write row j of request b to KV row `start_lens[slot] + row_offset + j` of its slot.

    Empty and stalled slots write nothing; a row that has no place of its own is left out, and the status says why.
    Requests of one call must not write the same rows.

    Args:
        k, v: [B, Q, Hkv, D], or packed [T, Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16, or float8_e4m3fn
            for pools of that; free strides except the last.
        k_pool, v_pool: [num_pages, page_size, Hkv, D] of the same dtype or float8_e4m3fn, free strides except the last;
            changed in place.
        page_table: [num_slots, max_pages] int32.
        start_lens: [num_slots] int32.
        num_valid: [B] int32, how many of the request's rows are written; None for all.
        cu_seqlens_q: [B + 1] int32: request b has the packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        k_scale, v_scale: what 1.0 in pools that k and v are rounded for stands for: k / k_scale and v / v_scale are
            rounded to the nearest of their numbers, ties to even, at most 448 in size; NaN stays NaN.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH where start_lens is negative, num_valid exceeds the
            rows or cu_seqlens_q leaves the input (no row is written), or a row is outside the page table; BAD_PAGE
            where the row has no page; SHARED_PAGE where its page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a scale that is no finite float32 above 0, or given where
            nothing is rounded.
    """
    _C.write_kv(
        stream,
        k,
        v,
        k_pool,
        v_pool,
        page_table,
        start_lens,
        row_offset,
        slots,
        num_valid,
        cu_seqlens_q,
        page_refs,
        k_scale,
        v_scale,
        status,
    )


def move_kv(
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    path: Tensor,
    num_valid: Tensor,
    seq_lens_before: Tensor,
    *,
    slots: Tensor | None = None,
    page_refs: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Bring the KV rows of an accepted path together, in every layer.

    Row L + path[b, j] goes to L + j for 1 <= j < num_valid[b], with L = seq_lens_before[slot]. Rows that are in place
    already are not touched. Empty and stalled slots move nothing. A move that cannot be made ends the request's moves,
    and the status says why. Slots of one call must be distinct.

    Args:
        k_pools, v_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16, free strides except the
            last; changed in place.
        page_table: [num_slots, max_pages] int32.
        path: [B, S] int32, from `verify_tree`: 0 first, strictly rising over the valid entries.
        num_valid: [B] int32, from `commit_tokens`.
        seq_lens_before: [num_slots] int32.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        status: [num_slots] int32. STALLED is read. Gains BAD_TREE where path does not start at 0 or does not rise,
            BAD_LENGTH where num_valid is not in 0..S, L is negative or a row is outside the page table, BAD_PAGE where
            a row has no page, SHARED_PAGE where the destination's page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.move_kv(stream, k_pools, v_pools, page_table, path, num_valid, seq_lens_before, slots, page_refs, status)


def copy_kv(
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    lens: Tensor,
    num_rows: Tensor,
    *,
    page_refs: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Copy the last `num_rows[b]` of the first `lens[dst]` KV rows from slot `src_slots[b]` to `dst_slots[b]`, in every
    layer: what `fork_pages` leaves to do.

    Rows keep their numbers. Rows with an empty slot on either side, and stalled destinations, copy nothing. A row that
    has no place on either side is left out, and the destination's status says why. Rows of one call must not write
    what others read or write.

    Args:
        k_pools, v_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16, free strides except the
            last; changed in place.
        page_table: [num_slots, max_pages] int32.
        src_slots: [B] int32.
        dst_slots: [B] int32.
        lens: [num_slots] int32, read at the destinations.
        num_rows: [B] int32, from `fork_pages`.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH where num_rows is not in 0..lens or lens is beyond
            the page table (no row is copied), BAD_PAGE where a row has no page, SHARED_PAGE where the destination's
            page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.copy_kv(stream, k_pools, v_pools, page_table, src_slots, dst_slots, lens, num_rows, page_refs, status)


# --- round ------------------------------------------------------------------------------------------------------------


def apply_commands(
    commands: Tensor,
    num_applied: Tensor,
    started_at: Tensor,
    seq_lens: Tensor,
    root_tokens: Tensor,
    remaining: Tensor,
    stop_tokens: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    stops_from: Tensor,
    num_logprobs: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    *,
    out_slots: Tensor | None = None,
    out_given_back: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The next record of a ring of commands becomes slot state: how a host steers rounds whose graph is fixed.

    Record number n = num_applied stands in row n % depth. Its words, floats as their bits: [0] written by this op,
    n + 1 once the record is applied and its row free; [1] how many slots to activate; then the slots of the round
    [max_batch] and the slots given back [num_slots], -1 behind both; then of each slot to activate, all different,
    slot, seq_len, root token, remaining, temperature, top_k, top_p, min_p, seed (low word, high word), stops_from,
    num_logprobs and M stop tokens.

    Slots given back get seq_lens, finish_reasons and status 0, before those to activate get their state (and
    finish_reasons 0; their status stays, and gains BAD_PAGE if it is STALLED: then their prefill was written nowhere).

    Args:
        commands: [depth, 2 + max_batch + num_slots * (13 + M)] int32; for CUDA, pinned host memory or on the device.
        num_applied: [1] int64, incremented.
        started_at: [1] int64, set to the device's clock in nanoseconds.
        seq_lens, root_tokens, remaining, top_k, stops_from, num_logprobs, finish_reasons, status: [num_slots] int32,
            changed in place.
        stop_tokens: [num_slots, M] int32, changed in place.
        temperature, top_p, min_p: [num_slots] float32, changed in place.
        seeds: [num_slots] int64, changed in place.

    Returns:
        out_slots [max_batch] int32 and out_given_back [num_slots] int32: for the ops of the round and for `free_pages`.

    Raises:
        ValueError: wrong dtype, shape or device; commands that are neither pinned nor on the device.
    """
    _, words = shape_of("apply_commands", "commands", commands, 2)
    num_slots, max_stops = shape_of("apply_commands", "stop_tokens", stop_tokens, 2)
    if out_slots is None:
        max_batch = max(words - 2 - num_slots * (13 + max_stops), 0)
        out_slots = empty("apply_commands", seq_lens, (max_batch,), "int32")
    if out_given_back is None:
        out_given_back = empty("apply_commands", seq_lens, (num_slots,), "int32")
    _C.apply_commands(
        stream,
        commands,
        num_applied,
        started_at,
        seq_lens,
        root_tokens,
        remaining,
        stop_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        stops_from,
        num_logprobs,
        finish_reasons,
        status,
        out_slots,
        out_given_back,
    )
    return out_slots, out_given_back


def publish_results(
    results: Tensor,
    num_published: Tensor,
    started_at: Tensor,
    out_tokens: Tensor,
    out_len: Tensor,
    out_path: Tensor,
    num_nodes: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    *,
    slots: Tensor | None = None,
    logprobs: Tensor | None = None,
    top_ids: Tensor | None = None,
    top_logprobs: Tensor | None = None,
    num_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """What a round did becomes the next record of a ring that the host reads without waiting for the stream.

    Record number n = num_published stands in row n % depth. Its words: [0] n + 1, written when all else is there; [2]
    and [4] started_at and the clock now (int64 each); from [8] on, for each row b, out_len, finish reason, status,
    num_nodes, S tokens and the S nodes of out_path. An empty row has finish reason and status 0. With scores the record
    ends with, for each row and the first row last, S log-probabilities, S * top_n ids and their log-probabilities,
    floats as their bits; those of slots that did not ask are not written.

    Args:
        results: [depth, words] int32, words even and at least 8 + B * (4 + 2 * S), with scores
            8 + B * (4 + 3 * S + 2 * S * top_n); for CUDA, pinned host memory or on the device.
        num_published: [1] int64, incremented.
        started_at: [1] int64, from `apply_commands`.
        out_tokens: [B, S] int32. out_len: [B] int32. Both as `commit_tokens` leaves them.
        out_path: [B, S] int32, as `verify_tree` made it: it tells the host which nodes were worth their place.
        num_nodes: [B] int32, of each tree.
        finish_reasons, status: [num_slots] int32.
        logprobs, top_ids, top_logprobs: scores, from `score_tokens`.
        num_logprobs: [num_slots] int32, given with scores: negative if the slot did not ask.

    Raises:
        ValueError: wrong dtype, shape or device; scores or num_logprobs alone; results that are too narrow, or neither
            pinned nor on the device.
    """
    _C.publish_results(
        stream,
        results,
        num_published,
        started_at,
        out_tokens,
        out_len,
        out_path,
        num_nodes,
        finish_reasons,
        status,
        slots,
        logprobs,
        top_ids,
        top_logprobs,
        num_logprobs,
    )
