"""Draft ops: top-k and sampling of draft logits, tree expansion, score calibration, draft-extend inputs."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C
from ._alloc import empty, shape_of, wrong_type
from ._tensor import Tensor
from .structs import Accepted, Candidates, Tree


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
    """K draws without replacement from softmax(logits / temperature) of every row, in draw order.

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
    """Run a later draft step: append the frontier's k * k children and keep the best k as the next frontier.

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
    """Allocate an identity calibration on the device of `like` (torch or NumPy).

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
    """Update the calibration of draft scores from which of a round's nodes were accepted.

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
    """Write the inputs of draft-extend: the tokens that a round accepted, as rows of the draft's forward pass.

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
    backlog_lens: Tensor,
    backlog_tokens: Tensor,
    *,
    features: Tensor | None = None,
    backlog_features: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Append the inputs of draft-extend to each slot's backlog, in a round without drafting: a ring of the last C rows.

    The accepted rows of request b follow the backlog_lens[slot] rows of its slot. Row i of a backlog is at i % C of the
    ring.

    Args:
        tokens, path: [B, S] int32, as `commit_tokens` left them.
        num_valid: [B] int32, from `commit_tokens`: rows that count.
        backlog_lens: [num_slots] int32, rows ever appended, overwritten ones included; changed in place.
        backlog_tokens: [num_slots, C] int32, the rings; changed in place.
        features: [B, N, F], or packed [M, F] with cu_seqlens_q; float32, float16 or bfloat16: one row per node, of
            which those on `path` are appended. None: tokens only.
        backlog_features: [num_slots, C, F] in the dtype of features, changed in place; None with them.
        slots: [B] int32, no slot twice. An empty row appends nothing.
        cu_seqlens_q: [B + 1] int32: node i of request b has row cu_seqlens_q[b] + i of features. A request without rows
            appends nothing.

    Raises:
        ValueError: wrong dtype, shape, device or stride; one of features and backlog_features alone.
    """
    _C.append_draft_backlog(
        stream, tokens, path, num_valid, backlog_lens, backlog_tokens, features, backlog_features, slots, cu_seqlens_q
    )
