"""The ops. One thin function each: allocate the outputs that were not passed, call the compiled op positionally.

Conventions: shapes are row-major and contiguous unless said; indices are int32; every op runs on the device of its
tensors (all the same), on the caller's current stream unless `stream=` names another, without synchronising, and is
legal inside a CUDA graph when its outputs are passed: `out=` takes what the op returns, and is returned. Nothing is
converted or copied for the caller: a wrong dtype, shape, device or stride is a ValueError that names the argument, a
struct that is something else a TypeError. `requires_grad` is ignored.

Letters: B batch, N tree nodes, S accept row width, k topk, V vocabulary, W mask words (ceil(N / 64)).
`slots[B]` names the slot each row works for (-1: an empty row); None means row b is slot b.

Lengths: `seq_lens[num_slots]` counts the tokens of a slot that are committed, L; `prefix_lens[num_slots]` the KV rows
in front of those that a call is about, which is L or what L was before; `num_valid[B]` the entries of a row that count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from . import _C
from ._alloc import arange_like, empty, empty_like, fill_zeros, shape_of, wrong_type
from ._tree import Tree as Tree
from ._tree import tree_outputs

if TYPE_CHECKING:
    Tensor: TypeAlias = Any  # anything that speaks DLPack


# --- draft ------------------------------------------------------------------------------------------------------------


class TopK(NamedTuple):
    """Tokens of each row of draft logits and their log-probabilities."""

    ids: Tensor  # [R, k] int32
    logprobs: Tensor  # [R, k] float32, never above 0


def select_topk(
    logits: Tensor,
    k: int,
    *,
    id_map: Tensor | None = None,
    out: TopK | None = None,
    stream: int | None = None,
) -> TopK:
    """Log-softmax and the k best of every row, in one pass over the logits.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf;
            entries of +inf share the whole probability.
        k: how many, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        TopK, best first.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range.
    """
    if out is None:
        rows, _ = shape_of("select_topk", "logits", logits, 2)
        out = TopK(empty("select_topk", logits, (rows, k), "int32"), empty("select_topk", logits, (rows, k), "float32"))
    elif not isinstance(out, TopK):
        raise wrong_type("select_topk", "out", out, TopK)
    _C.select_topk(stream, logits, k, id_map, *out)
    return out


def sample_draft(
    logits: Tensor,
    k: int,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    slots: Tensor | None = None,
    id_map: Tensor | None = None,
    out: TopK | None = None,
    stream: int | None = None,
) -> TopK:
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
        TopK, in draw order, with each token's log-probability in softmax(logits / temperature), before any draw. Where
        fewer than k entries have a probability, the lowest of the other indices follow, with -inf.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range; R no multiple of B.
    """
    op = "sample_draft"
    if out is None:
        rows, _ = shape_of(op, "logits", logits, 2)
        out = TopK(empty(op, logits, (rows, k), "int32"), empty(op, logits, (rows, k), "float32"))
    elif not isinstance(out, TopK):
        raise wrong_type(op, "out", out, TopK)
    _C.sample_draft(stream, logits, k, seeds, positions, temperature, slots, id_map, *out)
    return out


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


class DraftExtendInputs(NamedTuple):
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
    calibration: Tensor | None = None,
    out: tuple[Candidates, Frontier] | None = None,
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
        calibration: [D, 2] float32, D from 1 to 64: the table of a Calibration. What a score gets from a child at depth
            d is then its log-probability as row min(d, D) - 1 puts it right.

    Returns:
        Candidates and Frontier; every element of each is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "expand_root"
    if out is None:
        batch, k = shape_of(op, "topk_ids", topk_ids, 2)
        if slots is not None:
            (batch,) = shape_of(op, "slots", slots, 1)
        later = max(num_steps - 1, 0)
        columns, row = (batch, k + later * k * k), (batch, k)
        candidates = Candidates(
            tokens=empty(op, topk_ids, columns, "int32"),
            parents=empty(op, topk_ids, columns, "int32"),
            scores=empty(op, topk_ids, columns, "float32"),
        )
        frontier = Frontier(
            nodes=empty(op, topk_ids, row, "int32"),
            tokens=empty(op, topk_ids, row, "int32"),
            positions=empty(op, topk_ids, row, "int32"),
            mask=empty(op, topk_ids, (batch, k, max(1, -(-k * later // 64))), "int64"),
        )
    else:
        candidates, frontier = out
        if not isinstance(candidates, Candidates):
            raise wrong_type(op, "out[0]", candidates, Candidates)
        if not isinstance(frontier, Frontier):
            raise wrong_type(op, "out[1]", frontier, Frontier)
    _C.expand_root(
        stream,
        topk_ids,
        topk_logprobs,
        seq_lens,
        num_steps,
        slots,
        position_offset,
        calibration,
        *candidates,
        *frontier,
    )
    return candidates, frontier


def expand_tree(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    step: int,
    candidates: Candidates,
    frontier: Frontier,
    seq_lens: Tensor,
    *,
    slots: Tensor | None = None,
    position_offset: int = 0,
    calibration: Tensor | None = None,
    out: DraftInputs | None = None,
    stream: int | None = None,
) -> DraftInputs:
    """A later draft step: append the frontier's k * k children, keep the best k of them as the next frontier.

    What `expand_root` returned is updated in place: the candidates, and the frontier's nodes and mask. The tokens and
    positions of the new frontier are in the result.

    Child i of frontier node j is candidate k + (step - 2) * k * k + j * k + i. Its score is its parent's plus its
    log-probability, and never above its parent's. The new frontier is ordered by score, ties to the lower number;
    children of score -inf fill it where there is nothing better. Its masks are the parents' with the own bit
    (step - 1) * k + j; the last step's nodes are fed to no draft, and have theirs only where it fits in Wd words.

    Args:
        topk_ids, topk_logprobs: [B, k, k] int32 and float32, the children of each frontier node; NaN counts as -inf.
        step: depth of the children, 2 to num_steps.
        candidates, frontier: from `expand_root`. A node of the frontier that is no candidate yet has children of score
            -inf and parent -1; its tokens and positions are not read.
        seq_lens: [num_slots] int32, L.
        slots: [B] int32. An empty row appends token 0, parent -1, score -inf; its tokens and positions are 0.
        position_offset, calibration: as in `expand_root`.

    Returns:
        DraftInputs of the new frontier.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "expand_tree"
    if not isinstance(candidates, Candidates):
        raise wrong_type(op, "candidates", candidates, Candidates)
    if not isinstance(frontier, Frontier):
        raise wrong_type(op, "frontier", frontier, Frontier)
    if out is None:
        batch, k, _ = shape_of(op, "topk_ids", topk_ids, 3)
        out = DraftInputs(
            tokens=empty(op, topk_ids, (batch, k), "int32"),
            parent_rows=empty(op, topk_ids, (batch, k), "int32"),
            positions=empty(op, topk_ids, (batch, k), "int32"),
        )
    elif not isinstance(out, DraftInputs):
        raise wrong_type(op, "out", out, DraftInputs)
    nodes, _, _, mask = frontier
    _C.expand_tree(
        stream,
        topk_ids,
        topk_logprobs,
        step,
        *candidates,
        nodes,
        mask,
        seq_lens,
        slots,
        position_offset,
        calibration,
        *out,
    )
    return out


class Calibration(NamedTuple):
    """How often a child is taken of which a draft says p, by depth: logit p' = slope * logit p + offset.

    Depths beyond the last count as it. See `make_calibration`.
    """

    table: Tensor  # [D, 2] float32: slope and offset of each depth
    counts: Tensor  # [D, 16, 3] int64: of 16 bins of logit p, nodes, those taken, and the sum of logits in 2^-16


def make_calibration(num_depths: int, like: Tensor) -> Calibration:
    """A calibration that changes nothing yet, on the device of `like` (torch or NumPy).

    Args:
        num_depths: D, 1 to 64: one for each step of drafting.
        like: any tensor; says which library and device.

    Returns:
        A Calibration: slopes are 1, all else is 0.

    Raises:
        ValueError: num_depths out of range.
        TypeError: `like` is of a library whose tensors cannot be allocated here.
    """
    op = "make_calibration"
    if not 1 <= num_depths <= 64:
        raise ValueError(f"{op}: num_depths is {num_depths}, expected 1 to 64")
    table, counts = empty(op, like, (num_depths, 2), "float32"), empty(op, like, (num_depths, 16, 3), "int64")
    table[:, 0], table[:, 1], counts[...] = 1, 0, 0
    return Calibration(table, counts)


def update_calibration(
    calibration: Calibration,
    tree: Tree,
    scores: Tensor,
    accepted: Accepted,
    *,
    stream: int | None = None,
) -> None:
    """What became of a round's nodes moves how the scores of the next ones are put right.

    A node counts if what was emitted led to its parent and went on: then it was taken, or it was not. What its draft
    had said of it is the inverse of the table at its score less its parent's, so nothing else has to be kept of the
    round. Each depth gets the slope and the offset that make what was seen likeliest, with a prior at 1 and 0 (Platt
    scaling), where the last 8 to 16 thousand nodes count and older ones fade. All of it is the same on both devices.

    Not for drafts that are drawn, whose chance is another one, nor for trees with nodes that were scored otherwise.

    Args:
        calibration: changed in place. Its table is the one that `expand_root` and `expand_tree` had.
        tree: [B, N], of the draft: tokens, parents, positions and num_nodes are read. What was verified may be another
            tree, one that it was merged into, say.
        scores: [B, N] float32, of its nodes; the root's is 0. What is no number, or above its parent's, does not count.
        accepted: as `commit_tokens` left it: of empty, stalled and finished rows nothing is valid; no path is read.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    op = "update_calibration"
    if not isinstance(calibration, Calibration):
        raise wrong_type(op, "calibration", calibration, Calibration)
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    if not isinstance(accepted, Accepted):
        raise wrong_type(op, "accepted", accepted, Accepted)
    _C.update_calibration(
        stream,
        *calibration,
        tree.tokens,
        tree.parents,
        tree.positions,
        tree.num_nodes,
        scores,
        accepted.tokens,
        accepted.num_valid,
    )


def draft_extend_inputs(
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    prefix_lens: Tensor,
    num_nodes: int,
    *,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    position_offset: int = 0,
    out: DraftExtendInputs | None = None,
    stream: int | None = None,
) -> DraftExtendInputs:
    """What draft-extend runs on: the tokens a round accepted, as rows of a forward pass of the draft.

    Args:
        tokens, path: [B, S] int32, as `commit_tokens` left them.
        num_valid: [B] int32, from `commit_tokens`: rows that count.
        prefix_lens: [num_slots] int32, L before the round.
        num_nodes: N of the trees that `path` is of; no request has more tokens than nodes.
        slots: [B] int32. An empty row keeps nothing, and its positions count from 0.
        cu_seqlens_q: [B + 1] int32: node i of request b is row cu_seqlens_q[b] + i of what `node_rows` counts, as
            `pack_trees` has them; None: row b * num_nodes + i.
        position_offset: of row 0 beyond L.

    Returns:
        DraftExtendInputs.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "draft_extend_inputs"
    if out is None:
        batch, accept_width = shape_of(op, "tokens", tokens, 2)
        each, once = (batch, min(accept_width, num_nodes)), (batch,)
        out = DraftExtendInputs(
            tokens=empty(op, tokens, each, "int32"),
            positions=empty(op, tokens, each, "int32"),
            node_rows=empty(op, tokens, each, "int64"),
            last_rows=empty(op, tokens, once, "int64"),
            kept_slots=empty(op, tokens, once, "int64"),
        )
    elif not isinstance(out, DraftExtendInputs):
        raise wrong_type(op, "out", out, DraftExtendInputs)
    _C.draft_extend_inputs(
        stream, tokens, path, num_valid, prefix_lens, num_nodes, slots, cu_seqlens_q, position_offset, *out
    )
    return out


def append_draft_backlog(
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    num_kept: Tensor,
    kept_tokens: Tensor,
    *,
    features: Tensor | None = None,
    kept_features: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Keep what draft-extend would have read, where a draft rests: for each slot a ring of the last C rows.

    The accepted rows of request b follow the num_kept[slot] that its slot has: row i of all that were ever kept stands
    at i % C of the ring.

    Args:
        tokens, path: [B, S] int32, as `commit_tokens` left them.
        num_valid: [B] int32, from `commit_tokens`: rows that count.
        num_kept: [num_slots] int32, rows that were kept, those that the ring has lost among them; changed in place.
        kept_tokens: [num_slots, C] int32, the rings; changed in place.
        features: [B, N, F], or packed [M, F] with cu_seqlens_q; float32, float16 or bfloat16: a row for each node, of
            which that of `path` is kept. None: tokens alone.
        kept_features: [num_slots, C, F] in the dtype of features, changed in place; None with them.
        slots: [B] int32, no slot twice. An empty row keeps nothing.
        cu_seqlens_q: [B + 1] int32: node i of request b has row cu_seqlens_q[b] + i of features. A request without rows
            there keeps nothing.

    Raises:
        ValueError: wrong dtype, shape, device or stride; one of features and kept_features alone.
    """
    _C.append_draft_backlog(
        stream, tokens, path, num_valid, num_kept, kept_tokens, features, kept_features, slots, cu_seqlens_q
    )


# --- tree -------------------------------------------------------------------------------------------------------------


def build_tree(
    candidates: Candidates,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int,
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
        num_draft_tokens: N, 1 to 256.
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
        out = tree_outputs("build_tree", "candidates.tokens", candidates.tokens, num_draft_tokens)
    elif not isinstance(out, Tree):
        raise wrong_type("build_tree", "out", out, Tree)
    _C.build_tree(stream, *candidates, root_tokens, seq_lens, num_draft_tokens, slots, order, status, *out, out_scores)
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
    num_draft_tokens: int,
    *,
    out: tuple[Tree, Tensor] | None = None,
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
        tree = tree_outputs(op, "a_scores", a_scores, num_draft_tokens)
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
        num_draft_tokens,
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


# --- layers -----------------------------------------------------------------------------------------------------------


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    shares: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    out_scales: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row over its root mean square, times a weight; with `residual`, of the sum of both.

    Sums and products are float32; what is normalised is the sum as it is stored. On a GPU the op reads `weight` before
    the kernel launched ahead of it has finished: that one must not write it.

    Args:
        x: [T, H] float32, float16 or bfloat16; rows may be strided, here and below.
        weight: [H] of the same dtype.
        eps: added to the mean square, above 0.
        residual: [T, H] like x, added to it.
        shares: [T, taken] float32, beside a residual: x is then [T * taken, H], of which `moe_combine` would make what
            is added to the residual, with the same bits.
        out: the two results, None for one that is to be allocated. The second may be x or residual, and is None without
            a residual.
        out_scales: [G, T] float32, to be written: the rows are then float8_e4m3fn, the very numbers and scales that
            `quantize_fp8` makes of them, for whole rows (G is 1) or groups of 128. On a GPU rows then start on 16 bytes.

    Returns:
        The rows [T, H], and x + residual [T, H]; without a residual, x itself.

    Raises:
        ValueError: wrong dtype, shape, device or stride; out[1] or shares without a residual; out_scales of rows off 16
            bytes.
    """
    rows, total = out
    shape = shape_of("add_rms_norm", "x", x, 2)
    if shares is not None:
        shape = shape_of("add_rms_norm", "shares", shares, 2)[0], shape[1]
    if rows is None:
        rounded = out_scales is not None
        rows = empty("add_rms_norm", x, shape, "float8_e4m3fn") if rounded else empty_like("add_rms_norm", x, shape)
    if residual is not None and total is None:
        total = empty_like("add_rms_norm", x, shape)
    _C.add_rms_norm(stream, x, weight, eps, shares, residual, total, out_scales, rows)
    return rows, x if residual is None else total


def rms_norm_concat(
    embeddings: Tensor,
    tokens: Tensor,
    embedding_weight: Tensor,
    features: Tensor,
    feature_weight: Tensor,
    eps: float,
    *,
    feature_rows: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What an EAGLE-3 layer reads: the embeddings of tokens beside a feature each, both over their root mean squares.

    On a GPU the op reads the norms' weights before the kernel launched ahead of it has finished: that one must not
    write them.

    Args:
        embeddings: [V, H] float32, float16 or bfloat16; rows may be strided, here and below.
        tokens: [T] int32. A number outside a table, here and below, takes its nearest row.
        features: [F, H] like embeddings.
        feature_rows: [T] int32, the feature of each row; None: feature i is row i's, and F is T or more.
        embedding_weight, feature_weight: [H] of the same dtype, of the norms.
        eps: of both norms, above 0.
        out: the two results, None for one that is to be allocated.

    Returns:
        The pairs [T, 2 * H], embeddings first, and the features of the rows [T, H] as they were.

    Raises:
        ValueError: wrong dtype, shape, device or stride; an empty table.
    """
    pairs, kept = out
    if pairs is None or kept is None:
        (rows,) = shape_of("rms_norm_concat", "tokens", tokens, 1)
        _, width = shape_of("rms_norm_concat", "embeddings", embeddings, 2)
        pairs = empty_like("rms_norm_concat", embeddings, (rows, 2 * width)) if pairs is None else pairs
        kept = empty_like("rms_norm_concat", embeddings, (rows, width)) if kept is None else kept
    _C.rms_norm_concat(
        stream, embeddings, tokens, embedding_weight, features, feature_rows, feature_weight, eps, pairs, kept
    )
    return pairs, kept


def silu_and_mul(x: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """silu(gate) * up of rows that hold both side by side, in float32, rounded once.

    Args:
        x: [T, 2 * I] float32, float16 or bfloat16: gate, then up; rows may be strided.

    Returns:
        out [T, I].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, width = shape_of("silu_and_mul", "x", x, 2)
        out = empty_like("silu_and_mul", x, (rows, width // 2))
    _C.silu_and_mul(stream, x, out)
    return out


def small_m_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    gated: bool = False,
    plan: str | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Rows times a weight: `x @ weight.T + bias`, summed in float32, a few at the speed of reading the weight.

    The bits of a row do not depend on what is beside it, nor on how much. cuBLAS is quicker with more than 128 rows:
    the op reads the weight once for every 128 of them (Hopper) or 8. On Hopper it reads `weight` before the kernel
    launched before it on the stream has finished, which must therefore not be what writes it.

    Args:
        x: [M, K] float16 or bfloat16, at most 262144 rows, K a multiple of 64.
        weight: [N, K]; rows of both may be strided, and start on 16 bytes. Gated: [2 * N, K], those of the gate and
            then of up, N a multiple of 8.
        bias: of as many numbers and of out's dtype; None for none.
        x_scales, weight_scales: of float8_e4m3fn x and weight, [G, M] and [G, N] float32, whose groups start on 16
            bytes; one group of whole rows, or one of each 128 numbers, as `quantize_fp8` gives them. K is then a multiple
            of 128 and N of 16, a GPU one of Hopper, and out bfloat16, unless an out of float16 is given.
            weight_scales alone: of 4 bits, a weight [N, K / 2] uint8 of numbers 0 to 15 in the order of `nibble_of`
            (csrc/layers/gemm/small_m_gemm.h), K a multiple of 256 and N of 16; scales are as above, and the four lowest bits
            of each are the number that stands for 0. x has 16 bits.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        plan: forces a kernel, for tests and benchmarks: "sm80.mma", or on Hopper "sm90.wgmma", which it has by itself
            unless rows of `x` or `weight` overlap. The latter alone takes numbers of fewer bits.

    Returns:
        out [M, N].

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many rows; rows off 16 bytes; a plan that does not exist
            or that the device cannot run.
    """
    if out is None:
        rows, _ = shape_of("small_m_gemm", "x", x, 2)
        outs = shape_of("small_m_gemm", "weight", weight, 2)[0]
        shape = rows, outs // 2 if gated else outs
        out = empty_like("small_m_gemm", x, shape) if x_scales is None else empty("small_m_gemm", x, shape, "bfloat16")
    _C.small_m_gemm(stream, x, weight, bias, x_scales, weight_scales, gated, plan, out)
    return out


def moe_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    ends: Tensor,
    *,
    weight_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    gated: bool = False,
    again: bool = False,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Rows times the weights of the experts that they take: each weight that is taken is read once for every 32 rows
    that take it (16 where weights have scales, 8 where there are no more rows), and no other.

    Sums are float32. The bits of a row do not depend on what is beside it.

    Args:
        x: [T, K] float16 or bfloat16; with scales float8_e4m3fn, as `quantize_fp8` gives it. K is a multiple of 64, or of
            128 where weights have scales; rows may be strided, and start on 16 bytes.
        weight: [E, N, K] like x, or float8_e4m3fn with scales, at most 1024 experts, N a multiple of 16; gated: [E,
            2 * N, K], of each expert first the rows of the gate, N a multiple of 8.
        order: [M] int64, pairs of a row and an expert that it takes, by experts; M is a multiple of T, at most 262144,
            and pair i is of row i * T / M. Pairs that do not exist are taken for the nearest.
        ends: [E] int32, where the pairs of each expert end in `order`, and those of the next begin.
        weight_scales: [E, G, N] float32, or 2 * N of a gate: one group of whole rows, or one of each 128 numbers.
        x_scales: [G, T] float32, of as many groups.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        again: a call with these `order` and `ends` was launched on the stream since they were written, as that of gate
            and up is before that of down. On Hopper this one then reads them, and `weight`, before the kernel launched
            before it has finished, which must therefore not be what writes one of them.

    Returns:
        out [M, N], of each pair, in x's dtype; with x_scales bfloat16, unless an out of float16 is given. Rows of pairs
        that `order` does not have, or not before an end, stay as they are; without an out they are zeros.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many experts or pairs; rows off 16 bytes.
    """
    if out is None:
        outs = shape_of("moe_grouped_gemm", "weight", weight, 3)[1]
        shape = shape_of("moe_grouped_gemm", "order", order, 1)[0], outs // 2 if gated else outs
        out = (
            empty_like("moe_grouped_gemm", x, shape)
            if x_scales is None
            else empty("moe_grouped_gemm", x, shape, "bfloat16")
        )
        fill_zeros(out, stream)
    _C.moe_grouped_gemm(stream, x, weight, order, ends, x_scales, weight_scales, gated, again, out)
    return out


class Routing(NamedTuple):
    """Which experts rows take, what counts of each, and the pairs of a row and an expert as `moe_grouped_gemm` takes them:
    those of row r are r * J to r * J + J - 1."""

    experts: Tensor  # [T, J] int64, no expert twice in a row
    shares: Tensor  # [T, J] float32
    order: Tensor  # [T * J] int64, pairs by experts
    ends: Tensor  # [E] int32, where each expert's pairs in `order` end


def moe_route(
    scores: Tensor,
    taken: int,
    *,
    normalised: bool = False,
    out: Routing | None = None,
    stream: int | None = None,
) -> Routing:
    """The experts with the best scores of each row, and their shares, in one launch for up to 64 rows and 256 experts.

    Args:
        scores: [T, E] float32, float16 or bfloat16, at most 1024 experts; rows may be strided. Ties go to the lower
            number, and NaN counts as -inf.
        taken: J, how many experts each row takes, 1 to min(E, 32); T * J is at most 262144.
        normalised: shares are the softmax over the scores of the experts taken, and not over all.

    Returns:
        Routing, of each row the best expert first, and of each expert the pairs by rows.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "moe_route"
    if out is None:
        rows, experts = shape_of(op, "scores", scores, 2)
        out = Routing(
            experts=empty(op, scores, (rows, taken), "int64"),
            shares=empty(op, scores, (rows, taken), "float32"),
            order=empty(op, scores, (rows * taken,), "int64"),
            ends=empty(op, scores, (experts,), "int32"),
        )
    elif not isinstance(out, Routing):
        raise wrong_type(op, "out", out, Routing)
    _C.moe_route(stream, scores, taken, normalised, *out)
    return out


def moe_combine(made: Tensor, shares: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """What the experts of each row made of it, as one sum by their shares: in float32, in order, rounded once.

    Args:
        made: [T * J, H] float32, float16 or bfloat16: those of row r are r * J to r * J + J - 1; rows may be strided.
        shares: [T, J] float32.

    Returns:
        out [T, H].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, _ = shape_of("moe_combine", "shares", shares, 2)
        out = empty_like("moe_combine", made, (rows, shape_of("moe_combine", "made", made, 2)[1]))
    _C.moe_combine(stream, made, shares, out)
    return out


def quantize_fp8(
    x: Tensor,
    *,
    group_size: int | None = None,
    scale: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows as float8_e4m3fn and the scales that give them back: a scale is the largest of its numbers over 448, and at
    least 1e-12; each number is divided by it and rounded to nearest, ties to even. Beyond 448 is 448.

    Both sides of a product of 8 bits (`small_m_gemm`) are such rows. Source: DeepSeek-V3 (arXiv
    2412.19437), section 3.3.2.

    Args:
        x: [T, W] float32, float16 or bfloat16; rows may be strided.
        group_size: 128: a scale for each 128 numbers of a row, the last of them of what is left; None: one for a row.
        scale: [1] float32, of all rows, instead; group_size is then None.
        out: the two results, None for one that is to be allocated.

    Returns:
        The numbers [T, W] float8_e4m3fn, and the scales [G, T] float32, G groups that each start on 16 bytes.

    Raises:
        ValueError: wrong dtype, shape, device or stride; another group_size; a scale beside one.
    """
    numbers, scales = out
    if numbers is None or scales is None:
        rows, width = shape_of("quantize_fp8", "x", x, 2)
        groups = max(-(-width // (group_size or max(width, 1))), 1)
        numbers = empty("quantize_fp8", x, (rows, width), "float8_e4m3fn") if numbers is None else numbers
        if scales is None:
            scales = empty("quantize_fp8", x, (groups, -(-rows // 4) * 4), "float32")[:, :rows]
    _C.quantize_fp8(stream, x, group_size, scale, numbers, scales)
    return numbers, scales


def dequantize(
    numbers: Tensor, scales: Tensor, *, dtype: str = "bfloat16", out: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """What numbers of 8 or 4 bits stand for: times their scales, rounded once. The other way of `quantize_fp8`, and what
    stands for a weight of `small_m_gemm` where that does not multiply.

    Args:
        numbers: [N, K] float8_e4m3fn, or [N, K / 2] uint8 of 4 bits: as in `small_m_gemm`, or where K is no multiple of
            256, neighbours in a byte, the first in its lower half.
        scales: [G, N] float32, one group of whole rows, or one of each 128 numbers; of 4 bits G equal groups, and the
            four lowest bits of a scale are the number that stands for 0.
        dtype: of out, "float32", "float16" or "bfloat16".

    Returns:
        out [N, K].

    Raises:
        ValueError: wrong dtype, shape, device or stride; another number of groups.
    """
    if out is None:
        rows, width = shape_of("dequantize", "numbers", numbers, 2)
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dequantize: dtype is {dtype}, expected float32, float16 or bfloat16")
        in_4_bits = str(numbers.dtype).endswith("uint8")
        out = empty("dequantize", numbers, (rows, 2 * width if in_4_bits else width), dtype)
    _C.dequantize(stream, numbers, scales, out)
    return out


def rope_qkv_write_kv(
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    page_refs: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    status: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """What stands between a layer's query-key-value product and its attention, in one pass: query and key heads are
    normalised and rotated, and keys and values are written to the slots' pages as `write_kv` writes them.

    Args:
        qkv: [B, Q, Hq + 2 * Hkv, D], or packed [T, Hq + 2 * Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16,
            D 64, 128 or 256: query, key and value heads of every row; free strides except the last.
        rotations: [num_positions, D] float32: for each position the cosines of D / 2 angles, then their sines. Number d
            of a head is rotated with number d + D / 2, as Hugging Face models have it.
        positions: [B, Q] or packed [T] int32; one outside the table takes the nearest there is.
        k_pool, v_pool, page_table, prefix_lens, row_offset, num_valid, cu_seqlens_q, page_refs, k_scale, v_scale,
            status: those of `write_kv`. Queries are computed for every row; behind the last packed request they are 0.
        q_norm, k_norm: [D] of qkv's dtype, weights of a root mean square norm of each head; None for none.
        eps: of both norms, above 0.

    Returns:
        The queries [B, Q, Hq, D], or [T, Hq, D].

    Raises:
        ValueError: wrong dtype, shape, device or stride; a scale that `write_kv` refuses.
    """
    if out is None:
        *rows, heads, head_dim = shape_of("rope_qkv_write_kv", "qkv", qkv, 4 if cu_seqlens_q is None else 3)
        kv_heads = shape_of("rope_qkv_write_kv", "k_pool", k_pool, 4)[2]
        out = empty_like("rope_qkv_write_kv", qkv, (*rows, max(heads - 2 * kv_heads, 0), head_dim))
    _C.rope_qkv_write_kv(
        stream,
        qkv,
        rotations,
        positions,
        k_pool,
        v_pool,
        page_table,
        prefix_lens,
        row_offset,
        slots,
        num_valid,
        cu_seqlens_q,
        q_norm,
        k_norm,
        eps,
        page_refs,
        k_scale,
        v_scale,
        status,
        out,
    )
    return out


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
    max_kv_len: int | None = None,
    plan: str | None = None,
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
    captured call serves every length up to `max_kv_len`.

    On a GPU the kernel and how it divides the work, the plan, are chosen from shapes and `max_kv_len`, never from
    lengths. Without `max_kv_len` a request may have as much KV as the page table has room for, and the plan is made for
    4096 rows of it at most: pass what you know.

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
        fixed_split: batch invariance: long KV is cut at multiples of this many rows, a multiple of 128, instead of into
            even parts of the whole batch's KV; slower where few cuts leave multiprocessors idle. The workspace grows
            with max_kv_len over fixed_split; 1024 to 4096 is reasonable. No effect on the CPU.
        max_kv_len: KV rows, prefix and tail together, that no request exceeds, 1 or more; by default, and at most, what
            the page table has room for. A longer request is clamped to it on either device, as it is to the table, and
            reported as a bad length.
        plan: forces a plan by its name, as `tree_attention_plan` returns it, for tests and benchmarks; parts of a name
            behind "<machine>.<kernel>.<tile rows>" may be left out and follow the rules. None on the CPU.
        out: as q, any strides but the last; written.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        workspace: a contiguous tensor of any dtype with tree_attention_workspace(...) bytes or more, on 16 bytes;
            contents of no meaning before and after. Allocated when None. Calls that may run at the same time need one
            each. None is needed on the CPU.
        status: [num_slots] int32. STALLED is read. Bits are added: bad page where a needed table entry is no page (its
            rows are invisible), bad length where a length was out of range and clamped.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens beside cu_seqlens_q; window,
            soft_cap, a scale, fixed_split or max_kv_len out of range; k_scale or v_scale for pools that are not
            float8_e4m3fn; a plan that does not exist or cannot run such a call on this device; a workspace too small.

    Source: Dao et al., FlashAttention (arXiv 2205.14135) and FlashAttention-2 (2307.08691), online softmax in tiles;
    Shah et al., FlashAttention-3 (2407.08608), on Hopper's tensor cores; Dao et al., Flash-Decoding (2023), KV cut into
    parts that are merged by their sums of exponentials; Miao et al., SpecInfer (2305.09781), tree attention.
    """
    if out is None:
        shape = shape_of("tree_attention", "q", q, 4 if cu_seqlens_q is None else 3)
        out = empty("tree_attention", q, shape, str(q.dtype).rsplit(".", 1)[-1])
    if workspace is None:
        size = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
        workspace = empty("tree_attention", q, (size,), "uint8") if size else None
    _C.tree_attention(
        stream, q, k_pool, v_pool, page_table, prefix_lens, slots, q_lens, cu_seqlens_q, tail_len, mask, scale, window,
        soft_cap, k_scale, v_scale, fixed_split, max_kv_len, plan, out, lse, workspace, status,
    )  # fmt: skip
    return out


def tree_attention_workspace(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    plan: str | None = None,
) -> int:
    """How many bytes of workspace `tree_attention` needs for tensors of these shapes, whatever the lengths.

    It is 0 on the CPU. Without fixed_split it depends on the GPU and on the number of query rows, but is bounded (some
    20 MB on an H200); an engine makes one workspace of the most that any of its calls needs.

    Args:
        q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan: as for `tree_attention`; no element is read.

    Returns:
        The number of bytes.

    Raises:
        ValueError: wrong dtype, shape, device or stride; fixed_split is not a positive multiple of 128; max_kv_len or
            plan as for `tree_attention`.
    """
    size: int = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
    return size


def tree_attention_plan(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    plan: str | None = None,
) -> str:
    """Which plan `tree_attention` runs for tensors of these shapes, where rows of all of them start on 16 bytes.

    `specdec_kernels.attention_plan` gives the same without tensors or a GPU.

    Args:
        q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan: as for `tree_attention`; no element is read.

    Returns:
        Its name, as "sm90.cluster.16.blocks8.sharing1"; "cpu" on the CPU.

    Raises:
        ValueError: as `tree_attention_workspace`.
    """
    name: str = _C.tree_attention_plan(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
    return name


# --- verify -----------------------------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    """What a round's verification emits; rows of fixed width S with `num_valid` of each in use."""

    tokens: Tensor  # [B, S] int32: accepted drafts, then the bonus token, then -1
    num_valid: Tensor  # [B] int32
    path: Tensor  # [B, S] int32: the tree node whose logits gave each token (root first, rising), the last repeated


def verify_tree(
    logits: Tensor,
    tree: Tree,
    accept_width: int,
    *,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
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
    plan: str | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    out: Accepted | None = None,
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
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16, free strides except the
            last: the target's logits of every node. N is at most 512 and V at most 2^22.
        tree: all of it is read but the mask. A row with num_nodes <= 0 is empty.
        accept_width: S, the width of the emitted rows: the deepest possible node + 1.
        cu_seqlens_q: [B + 1] int32: node i of request b has the packed row cu_seqlens_q[b] + i. Trees stay padded.
        temperature: [num_slots] float32; 0 (and below) is greedy. None: all requests are.
        top_k: [num_slots] int32; 0 (and below) is off.
        top_p: [num_slots] float32; 1 (and above) is off.
        min_p: [num_slots] float32; 0 (and below) is off.
        seeds: [num_slots] int64, given with temperature.
        vocab_mask: [B, N, ceil(V / 32)] or packed [M, ceil(V / 32)] int32 bit patterns: bit v % 32 of word v / 32
            allows token v at the node.
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
        plan: forces a kernel on a GPU, for tests and benchmarks: "walk" or "at_once", all nodes' tokens first, which
            is quicker for few; "rejection" with draft_logits.
        workspace: memory of `verify_tree_workspace` bytes or more, of any dtype, on 16 bytes, contents of no meaning
            before and after; allocated when None. Calls that may run at the same time need one each.
        status: [num_slots] int32. Gains BAD_LOGITS where a row of logits has nothing above -inf (the walk ends without
            a bonus token: nothing at all is emitted when it is the root's), BAD_TREE where a link leaves the tree, does
            not rise or contradicts `parents`, siblings differ in their draft row or name none of draft_logits, or
            num_nodes exceeds N or the request's packed rows (the walk ends with a bonus token, if its root has a row).

    Returns:
        Accepted. Empty rows: num_valid 0, tokens -1, path 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; accept_width < 1; seeds missing, or parameters of sampling
            without temperature; draft_rows missing, or parameters of drafts without draft_logits; a plan
            that does not exist or fit the call; a workspace too small.
    """
    op = "verify_tree"
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    if out is None:
        shape_of(op, "logits", logits, 3 if cu_seqlens_q is None else 2)
        (batch,) = shape_of(op, "tree.num_nodes", tree.num_nodes, 1)
        width = max(accept_width, 0)  # a bad width is for the op to name
        out = Accepted(
            tokens=empty(op, logits, (batch, width), "int32"),
            num_valid=empty(op, logits, (batch,), "int32"),
            path=empty(op, logits, (batch, width), "int32"),
        )
    elif not isinstance(out, Accepted):
        raise wrong_type(op, "out", out, Accepted)
    if workspace is None:
        packed_nodes = None if cu_seqlens_q is None else shape_of(op, "tree.tokens", tree.tokens, 2)[1]
        size = _C.verify_tree_workspace(logits, packed_nodes, temperature, draft_logits, plan)
        workspace = empty(op, logits, (size,), "uint8") if size else None
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
        cu_seqlens_q,
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
        plan,
        workspace,
        status,
        *out,
    )
    return out


def verify_tree_workspace(
    logits: Tensor,
    *,
    num_nodes: int | None = None,
    temperature: Tensor | None = None,
    draft_logits: Tensor | None = None,
    plan: str | None = None,
) -> int:
    """How many bytes of workspace `verify_tree` needs for tensors of these shapes.

    Args:
        logits, temperature, draft_logits, plan: as for `verify_tree`; no element is read.
        num_nodes: N of the trees, where logits are packed [M, V]; else None.

    Returns:
        Bytes, 0 on the CPU.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a plan that does not exist or fit the call.
    """
    size: int = _C.verify_tree_workspace(logits, num_nodes, temperature, draft_logits, plan)
    return size


class LogitEdits(NamedTuple):
    """What each slot asks of its logits; see `make_logit_edits`."""

    kinds: Tensor  # [num_slots] int32, bits of Edit; 0: nothing
    bias: Tensor  # [num_slots, V] float32
    counts: Tensor  # [num_slots, V] int32: twice how often a token was generated, and one if it is in the prompt
    presence: Tensor  # [num_slots] float32
    frequency: Tensor  # [num_slots] float32
    repetition: Tensor  # [num_slots] float32, above 0


def make_logit_edits(num_slots: int, vocab: int, like: Tensor) -> LogitEdits:
    """Slots that ask nothing of their logits, on the device of `like` (torch or NumPy): 8 bytes a slot and token.

    Args:
        num_slots: rows of every tensor.
        vocab: V, of the target.
        like: any tensor; says which library and device.

    Returns:
        A LogitEdits: kinds, bias, counts, presence and frequency are 0, repetition is 1.

    Raises:
        ValueError: num_slots or vocab below 0.
        TypeError: `like` is of a library whose tensors cannot be allocated here.
    """
    op = "make_logit_edits"
    for name, number in (("num_slots", num_slots), ("vocab", vocab)):
        if number < 0:
            raise ValueError(f"{op}: {name} is {number}, expected at least 0")

    def filled(value: int, dtype: str, width: tuple[int, ...] = ()) -> Tensor:
        tensor = empty(op, like, (num_slots, *width), dtype)
        tensor[...] = value
        return tensor

    return LogitEdits(
        kinds=filled(0, "int32"),
        bias=filled(0, "float32", (vocab,)),
        counts=filled(0, "int32", (vocab,)),
        presence=filled(0, "float32"),
        frequency=filled(0, "float32"),
        repetition=filled(1, "float32"),
    )


def edit_logits(
    logits: Tensor,
    mask: Tensor,
    tokens: Tensor,
    edits: LogitEdits,
    *,
    vocab_mask: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Do to the logits what requests ask for, before `verify_tree`; those of slots that ask nothing are not touched.

    In this order, by the bits of `edits.kinds[slot]`. BIAS: the slot's bias is added. PENALTIES, of a token that was
    generated n times, in committed text or on the way to the node: where it was, or stands in the prompt, a logit above
    0 is divided by `repetition`, others are multiplied by it ([Keskar et al. 2019](https://arxiv.org/abs/1909.05858));
    then n times `frequency` is subtracted, and `presence` where n is not 0. MASK: tokens that `vocab_mask` does not
    allow get -inf. Each step is a float32 operation, and the result is rounded once to the dtype of the logits: 16 bits
    do not hold a change that is small beside the logit.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16, free strides except the
            last, changed in place.
        mask: [B, N, W] or packed [M, W] int64 bit patterns, as in Tree: the node of each row and its ancestors.
        tokens: [B, K] int32 tokens of the trees that `mask` numbers. Node 0, the root, is committed, and counts no
            second time.
        edits: of the slots; `commit_tokens` keeps its counts.
        vocab_mask: int32 bit patterns, [B, N, ceil(V / 32)] or packed [M, ceil(V / 32)]: bit v % 32 of word v / 32
            allows token v at that node. Rows of slots without MASK are not read. None: no slot has MASK.
        cu_seqlens_q: [B + 1] int32: request b has the packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if not isinstance(edits, LogitEdits):
        raise wrong_type("edit_logits", "edits", edits, LogitEdits)
    _C.edit_logits(stream, logits, mask, tokens, *edits, vocab_mask, slots, cu_seqlens_q)


def mask_stops(
    logits: Tensor,
    positions: Tensor,
    stop_tokens: Tensor,
    stops_from: Tensor,
    *,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Rule out stop tokens where it is too early for them, before `verify_tree`.

    A slot's stop tokens get logit -inf at every node whose next token would stand at a position before
    `stops_from[slot]`.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16, free strides except the
            last, changed in place.
        positions: [B, N] or packed [M] int32, of the nodes' tokens.
        stop_tokens: [num_slots, M] int32; what is no token (-1) is none.
        cu_seqlens_q: [B + 1] int32: request b has the packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        stops_from: [num_slots] int32, the first position where a stop token may stand; 0 (and below): anywhere.

    Raises:
        ValueError: wrong dtype, shape, device or stride; nodes (all rows where they are packed) times stop tokens
            beyond int32.
    """
    _C.mask_stops(stream, logits, positions, stop_tokens, stops_from, slots, cu_seqlens_q)


class TokenScores(NamedTuple):
    """Log-probabilities of emitted tokens, and of the best alternatives to each."""

    logprobs: Tensor  # [B, S] float32
    top_ids: Tensor  # [B, S, top_n] int32, best first
    top_logprobs: Tensor  # [B, S, top_n] float32


def score_tokens(
    logits: Tensor,
    accepted: Accepted,
    *,
    top_n: int = 0,
    slots: Tensor | None = None,
    num_logprobs: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    out: TokenScores | None = None,
    stream: int | None = None,
) -> TokenScores:
    """What `verify_tree` emitted, scored: log-softmax of the raw logits that chose each token.

    Logits of other nodes are not read. A token beyond its row's num_valid has log-probability -inf and ids -1, and so
    has one whose node or token is out of range, or whose request did not ask.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16; only the last dimension
            need be contiguous. NaN counts as -inf, entries of +inf share the whole probability.
        accepted: the tokens, how many of each row count, and the node behind each.
        top_n: how many of the best entries of each token's logits to list, 0 to min(V, 64); ties to the lower id.
        num_logprobs: [num_slots] int32, how many of the top_n a slot wants, with ids -1 and -inf behind them; -1 (and
            below) if not even its tokens are to be scored. Then their logits are not read. None: all of all rows.

        cu_seqlens_q: [B + 1] int32: node i of request b has the packed row cu_seqlens_q[b] + i.

    Returns:
        TokenScores; every element of it is written, and none is above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; top_n out of range; slots without num_logprobs.
    """
    op = "score_tokens"
    if not isinstance(accepted, Accepted):
        raise wrong_type(op, "accepted", accepted, Accepted)
    tokens, num_valid, path = accepted
    if out is None:
        batch, width = shape_of(op, "accepted.path", path, 2)
        listed = (batch, width, max(top_n, 0))
        out = TokenScores(
            logprobs=empty(op, logits, (batch, width), "float32"),
            top_ids=empty(op, logits, listed, "int32"),
            top_logprobs=empty(op, logits, listed, "float32"),
        )
    elif not isinstance(out, TokenScores):
        raise wrong_type(op, "out", out, TokenScores)
    _C.score_tokens(stream, logits, path, tokens, num_valid, top_n, slots, num_logprobs, cu_seqlens_q, *out)
    return out


class SlotState(NamedTuple):
    """What an engine keeps of each slot between rounds; see `make_slot_state`. Each [num_slots], int32 unless said.

    Ops that take a SlotState advance it in place; the others take its tensors one by one.
    """

    seq_lens: Tensor  # L: tokens committed, whose KV stands in rows 0 to L - 1; the root is the token at position L
    prefix_lens: Tensor  # L before the round
    root_tokens: Tensor  # the last token emitted, or the prompt's last
    remaining: Tensor  # tokens the request may still emit
    max_seq_lens: Tensor  # tokens the sequence may have, prompt and root included
    stop_tokens: Tensor  # [num_slots, max_stops], -1 for none
    stops_from: Tensor  # the first position where a stop token may stand, 0 for anywhere
    temperature: Tensor  # float32; where it is 0, greedy, the next four mean nothing
    top_k: Tensor  # 0 is off
    top_p: Tensor  # float32, 1 is off
    min_p: Tensor  # float32, 0 is off
    seeds: Tensor  # int64
    num_logprobs: Tensor  # best entries to list beside each token; -1: score nothing
    max_nodes: Tensor  # of a tree that is verified, the root included
    finish_reasons: Tensor  # of FinishReason, 0 while the request runs
    status: Tensor  # sticky bits of Status


def make_slot_state(num_slots: int, max_seq_len: int, max_stops: int, like: Tensor) -> SlotState:
    """Slots that are empty, greedy and without limits but one, on the device of `like` (torch or NumPy).

    Args:
        num_slots: rows of every tensor.
        max_seq_len: what `max_seq_lens` holds for each slot.
        max_stops: width of `stop_tokens`, which holds -1; may be 0.
        like: any tensor; says which library and device.

    Returns:
        A SlotState: seq_lens, remaining and the like are 0, top_p is 1, num_logprobs is -1, max_nodes is 256.

    Raises:
        ValueError: num_slots or max_stops below 0.
        TypeError: `like` is of a library whose tensors cannot be allocated here.
    """
    op = "make_slot_state"
    for name, number in (("num_slots", num_slots), ("max_stops", max_stops)):
        if number < 0:
            raise ValueError(f"{op}: {name} is {number}, expected at least 0")

    def filled(value: int, dtype: str = "int32", width: tuple[int, ...] = ()) -> Tensor:
        tensor = empty(op, like, (num_slots, *width), dtype)
        tensor[...] = value
        return tensor

    return SlotState(
        seq_lens=filled(0),
        prefix_lens=filled(0),
        root_tokens=filled(0),
        remaining=filled(0),
        max_seq_lens=filled(max_seq_len),
        stop_tokens=filled(-1, width=(max_stops,)),
        stops_from=filled(0),
        temperature=filled(0, "float32"),
        top_k=filled(0),
        top_p=filled(1, "float32"),
        min_p=filled(0, "float32"),
        seeds=filled(0, "int64"),
        num_logprobs=filled(-1),
        max_nodes=filled(256),
        finish_reasons=filled(0),
        status=filled(0),
    )


def commit_tokens(
    accepted: Accepted,
    state: SlotState,
    *,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Cut what `verify_tree` emitted at a stop token or a limit, and advance the slots by what is left.

    A row is cut at its first stop token, which stays as the last one; at `remaining` tokens; and where the sequence,
    root included, would outgrow `max_seq_lens`. Then with n = num_valid and L = seq_lens[slot]: prefix_lens = L,
    seq_lens = L + n, root_tokens = the last token kept, remaining -= n. Where several reasons to finish coincide, STOP
    goes before LENGTH before CONTEXT. Empty rows, finished slots and stalled ones emit nothing and keep their state,
    except that prefix_lens = seq_lens. A running slot with n = 0 does not advance. Slots of one call must be distinct.

    Args:
        accepted: tokens [B, S] and num_valid [B] are changed in place, to -1 and to nothing behind the cut.
        state: stop_tokens and max_seq_lens are read; seq_lens, prefix_lens, root_tokens, remaining and finish_reasons
            are changed in place. Of status STALLED is read; it gains BAD_LENGTH where num_valid is not in 0..S or
            seq_lens is negative (such a row emits nothing).
        counts: [num_slots, V] int32, those of LogitEdits: each token that a slot emits adds 2. None: nobody counts.

    Returns:
        [B] int32: num_valid where the slot goes on, else 0; what `move_kv` and draft-extend work on.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    op = "commit_tokens"
    if not isinstance(accepted, Accepted):
        raise wrong_type(op, "accepted", accepted, Accepted)
    if not isinstance(state, SlotState):
        raise wrong_type(op, "state", state, SlotState)
    if out is None:
        (batch,) = shape_of(op, "accepted.num_valid", accepted.num_valid, 1)
        out = empty(op, accepted.num_valid, (batch,), "int32")
    _C.commit_tokens(
        stream,
        accepted.tokens,
        accepted.num_valid,
        state.stop_tokens,
        state.remaining,
        state.max_seq_lens,
        state.seq_lens,
        state.prefix_lens,
        state.root_tokens,
        state.finish_reasons,
        slots,
        state.status,
        counts,
        out,
    )
    return out


# --- kv ---------------------------------------------------------------------------------------------------------------


class PagePool(NamedTuple):
    """Which KV pages are free and which slot holds which, for every layer's pool alike. See `make_page_pool`."""

    page_table: Tensor  # [num_slots, max_pages] int32 page ids, -1 for none
    page_counts: Tensor  # [num_slots] int32: entries of its row that a slot got pages for, the first ones
    page_starts: Tensor  # [num_slots] int32: of these, the first one that is held still; those before were given back
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
        page_starts=filled((num_slots,), 0),
        page_refs=filled((num_pages,), 0),
        free_stack=filled((num_pages,), arange_like(like, num_pages - 1, -1, -1)),
        num_free=filled((1,), num_pages),
        page_size=page_size,
    )


def alloc_pages(
    pool: PagePool,
    seq_lens: Tensor,
    reserve: int,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Top each slot's page table up to the pages that `seq_lens[slot] + reserve` rows need, row after row of `slots`.

    A slot that does not fit gets nothing and is stalled; later ones are still tried. A slot named twice is served once.

    Args:
        pool: changed in place.
        seq_lens: [num_slots] int32.
        reserve: rows beyond them, at least 0.
        slots: [B] int32; None for all slots in order.
        status: [num_slots] int32. STALLED is set where the free pages do not suffice, cleared where they do. Gains
            BAD_LENGTH where seq_lens is negative, where more than max_pages are wanted, or page_counts is not a count
            (such a slot gets nothing); BAD_PAGE where the stack held something else than a page.

    Raises:
        ValueError: wrong dtype, shape, device or stride; reserve < 0.
    """
    _C.alloc_pages(stream, pool, seq_lens, reserve, slots, status)


def free_pages(
    pool: PagePool,
    prefix_lens: Tensor,
    *,
    window: int | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Take back each slot's pages beyond the first `prefix_lens[slot]` rows (0: all), row after row of `slots`; or with
    a window those that lie wholly before the last `window` of these rows, which no layer with this window sees again.

    A page loses one owner and is free when it has none left. The last page goes first, so that the next `alloc_pages`
    gives the same pages in the same order.

    Args:
        pool: changed in place; entries given back become -1.
        prefix_lens: [num_slots] int32, rows to keep; more than the slot holds keeps everything.
        window: 1 or more: `page_counts` stays then, and `page_starts` grows. None: pages at the end go.
        slots: [B] int32; None for all slots in order.
        status: [num_slots] int32. Gains BAD_LENGTH where prefix_lens is negative or page_counts is not a count (nothing
            is returned), BAD_PAGE where an entry is not a page or a page had no owner (it is skipped).

    Raises:
        ValueError: wrong dtype, shape, device or stride; window < 1.
    """
    _C.free_pages(stream, pool, prefix_lens, window, slots, status)


def fork_pages(
    pool: PagePool,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    *,
    status: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Give the empty slot `dst_slots[b]` the first `prefix_lens[dst]` rows of slot `src_slots[b]`: several samples of
    one prompt, or a prefix that requests have in common.

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
        prefix_lens: [num_slots] int32, read at the destinations; usually `seq_lens`, which a fork has from its source.
        status: [num_slots] int32, of the destinations. STALLED is set where a partial page finds no free one (the
            destination stays empty), cleared where the fork is made. Gains BAD_LENGTH where the destination is not
            empty, prefix_lens is negative or needs more pages than the source holds (no fork is made); BAD_PAGE where
            an entry of the source is no page with an owner (the destination's entry stays missing), or the stack held
            something else than a page.

    Returns:
        [B] int32: rows of the partial page, which `copy_kv` has to copy; 0 where there are none, or no
        fork was made.

    Raises:
        ValueError: wrong dtype, shape, device or stride; more than 512 rows.
    """
    if out is None:
        (batch,) = shape_of("fork_pages", "src_slots", src_slots, 1)
        out = empty("fork_pages", src_slots, (batch,), "int32")
    _C.fork_pages(stream, pool, src_slots, dst_slots, prefix_lens, status, out)
    return out


def assign_pages(pool: PagePool, src_entries: Tensor, dst_entries: Tensor, *, stream: int | None = None) -> None:
    """Make entries of the page table name the pages of other entries, as shared pointers are assigned.

    An entry is a number, slot * max_pages + index. Its new page gains an owner, its old one loses one, and is free when
    it has none left. With entries of slots that nobody runs a host can keep the pages of a slot that ends, give them to
    another slot, and let go of them, without knowing which pages they are. All sources are taken as they were before
    the call; destinations let go row after row. `page_counts` stay as they are.

    Args:
        pool: changed in place.
        src_entries: [B] int32, B at most 512. One that is no entry, as -1, or has no page with an owner, leaves the
            destination without a page (-1).
        dst_entries: [B] int32. One that is no entry, or that an earlier row names, makes an empty row. What was no page
            with an owner is overwritten and not freed.

    Raises:
        ValueError: wrong dtype, shape, device or stride; more than 512 rows.
    """
    _C.assign_pages(stream, pool, src_entries, dst_entries)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
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
    """Write row j of request b to KV row `prefix_lens[slot] + row_offset + j` of its slot.

    Empty and stalled slots write nothing; a row that has no place of its own is left out, and the status says why.
    Requests of one call must not write the same rows.

    Args:
        k, v: [B, Q, Hkv, D], or packed [T, Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16, or float8_e4m3fn
            for pools of that; free strides except the last.
        k_pool, v_pool: [num_pages, page_size, Hkv, D] of the same dtype or float8_e4m3fn, free strides except the last;
            changed in place.
        page_table: [num_slots, max_pages] int32.
        prefix_lens: [num_slots] int32.
        num_valid: [B] int32, how many of the request's rows are written; None for all.
        cu_seqlens_q: [B + 1] int32: request b has the packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        k_scale, v_scale: what 1.0 in pools that k and v are rounded for stands for: k / k_scale and v / v_scale are
            rounded to the nearest of their numbers, ties to even, at most 448 in size; NaN stays NaN.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH where prefix_lens is negative, num_valid exceeds
            the rows or cu_seqlens_q leaves the input (no row is written), or a row is outside the page table; BAD_PAGE
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
        prefix_lens,
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
    prefix_lens: Tensor,
    *,
    slots: Tensor | None = None,
    page_refs: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Bring the KV rows of an accepted path together, in every layer.

    Row L + path[b, j] goes to L + j for 1 <= j < num_valid[b], with L = prefix_lens[slot]. Rows that are in place
    already are not touched. Empty and stalled slots move nothing. A move that cannot be made ends the request's moves,
    and the status says why. Slots of one call must be distinct.

    Args:
        k_pools, v_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16, free strides except the
            last; changed in place.
        page_table: [num_slots, max_pages] int32.
        path: [B, S] int32, from `verify_tree`: 0 first, strictly rising over the valid entries.
        num_valid: [B] int32, from `commit_tokens`.
        prefix_lens: [num_slots] int32.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        status: [num_slots] int32. STALLED is read. Gains BAD_TREE where path does not start at 0 or does not rise,
            BAD_LENGTH where num_valid is not in 0..S, L is negative or a row is outside the page table, BAD_PAGE where
            a row has no page, SHARED_PAGE where the destination's page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.move_kv(stream, k_pools, v_pools, page_table, path, num_valid, prefix_lens, slots, page_refs, status)


def copy_kv(
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    num_rows: Tensor,
    *,
    page_refs: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Copy the last `num_rows[b]` of the first `prefix_lens[dst]` KV rows from slot `src_slots[b]` to `dst_slots[b]`,
    in every layer: what `fork_pages` leaves to do.

    Rows keep their numbers. Rows with an empty slot on either side, and stalled destinations, copy nothing. A row that
    has no place on either side is left out, and the destination's status says why. Rows of one call must not write
    what others read or write.

    Args:
        k_pools, v_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16, free strides except the
            last; changed in place.
        page_table: [num_slots, max_pages] int32.
        src_slots: [B] int32.
        dst_slots: [B] int32.
        prefix_lens: [num_slots] int32, read at the destinations.
        num_rows: [B] int32, from `fork_pages`.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH where num_rows is not in 0..prefix_lens or
            prefix_lens is beyond the page table (no row is copied), BAD_PAGE where a row has no page, SHARED_PAGE where
            the destination's page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _C.copy_kv(stream, k_pools, v_pools, page_table, src_slots, dst_slots, prefix_lens, num_rows, page_refs, status)
