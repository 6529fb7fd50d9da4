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
    """Return the k best tokens of each row and their log-softmax, in one pass over the logits.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf; entries of +inf share the
            whole probability.
        k: tokens per row, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, maps a reduced draft vocabulary to the target's ids: `arange(Vd) + d2t`.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

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
    """Draw k tokens per row without replacement from softmax(logits / temperature), in draw order.

    Gumbel top-k (Kool et al., 2019, arXiv 1903.06059). The noise of an entry depends only on its request's seed, the
    position of the drawn token, the row's index within its request, and the entry's index: not on the batch, the slot
    or k, so fewer draws are a prefix of more. Rows of one request are independent; draw each depth of a tree in one
    call.

    A request of temperature 0 (or below, or NaN) is greedy: it gets what `select_topk` returns.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. R = B * Q: request b has rows b * Q to b * Q
            + Q - 1, such as the Q nodes of one depth of its tree. NaN counts as -inf; entries of +inf share the whole
            probability.
        k: draws per row, 1 to min(Vd, 64).
        seeds: [num_slots] int64.
        positions: [R] int32, the absolute position of the drawn token.
        temperature: [num_slots] float32.
        slots: [B] int32; None: B = num_slots. An empty row has ids 0 and log-probabilities -inf.
        id_map: [Vd] int32, maps a reduced draft vocabulary to the target's ids: `arange(Vd) + d2t`.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        TopK in draw order. The log-probability of a token is that in softmax(logits / temperature) before any draw. If
        fewer than k entries have a probability, the lowest other indices follow, with -inf.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range; R is not a multiple of B.
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
    """The k nodes that the draft's next forward pass reads, best first."""

    nodes: Tensor  # [B, k] int32 candidate indices
    tokens: Tensor  # [B, k] int32
    positions: Tensor  # [B, k] int32
    mask: Tensor  # [B, k, Wd] int64 bit patterns, Wd = max(1, ceil(k * (num_steps - 1) / 64))


class DraftExtendInputs(NamedTuple):
    """Rows of draft-extend, with W = min(S, num_nodes) for each request."""

    tokens: Tensor  # [B, W] int32, 0 where there is none
    positions: Tensor  # [B, W] int32
    node_rows: Tensor  # [B, W] int64, below B * num_nodes: the tree node of each row
    last_rows: Tensor  # [B] int64, below B * W: the last valid row of each request, else its first
    kept_slots: Tensor  # [B] int64: the slot whose draft state becomes that row; num_slots if no row is valid


class DraftInputs(NamedTuple):
    """The inputs of the draft's forward pass over an expanded frontier, except its mask."""

    tokens: Tensor  # [B, k] int32
    parent_rows: Tensor  # [B, k] int32, rows of the previous frontier's [B * k] features
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
    """Run draft step 1: the root's k children become candidates 0 to k - 1 and the first frontier.

    Frontier node j of depth s is tail row (s - 1) * k + j of the draft. Bit r of its mask is set if tail row r is the
    node or an ancestor. Columns that later steps fill hold token 0, parent -1, score -inf; so do all columns of an
    empty row, whose frontier has tokens and positions 0.

    Args:
        topk_ids: [num_slots, k] int32, the root's children, kept per slot; k is 1 to 64.
        topk_logprobs: [num_slots, k] float32; NaN counts as -inf.
        seq_lens: [num_slots] int32, L.
        num_steps: depth of drafting, 1 to 1024.
        slots: [B] int32; None: B = num_slots.
        position_offset: a node of depth d has RoPE position L + d - 1 + position_offset: 0 for EAGLE heads, 1 for a
            standalone draft.
        calibration: [D, 2] float32, D from 1 to 64: the table of a Calibration, whose row min(d, D) - 1 corrects the
            log-probability that a child of depth d adds to its score.
        out: preallocated results.
        stream: CUDA stream; None: the current one.

    Returns:
        Candidates and Frontier; every element is written.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_steps or k out of range.
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
        stream, topk_ids, topk_logprobs, seq_lens, num_steps, slots, position_offset, calibration, *candidates,
        *frontier,
    )  # fmt: skip
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
    """Run a later draft step: append the frontier's k * k children, and make the best k of them the next frontier.

    The result of `expand_root` is updated in place: the candidates, and the frontier's nodes and mask. Tokens and
    positions of the new frontier are in the returned DraftInputs.

    Child i of frontier node j is candidate k + (step - 2) * k * k + j * k + i. Its score is its parent's plus its own
    log-probability, but never above its parent's. The new frontier is ordered by score, ties to the lower candidate;
    children of score -inf fill it if there are no better ones. A node's mask is its parent's and its own bit (step - 1)
    * k + j. Nodes of the last step are no input of a draft: their own bit is set only if it fits into Wd words.

    Source: the dynamic draft tree of EAGLE-2 (Li et al., arXiv 2406.16858).

    Args:
        topk_ids: [B, k, k] int32, the children of each frontier node.
        topk_logprobs: [B, k, k] float32; NaN counts as -inf.
        step: depth of the children, 2 to num_steps.
        candidates: from `expand_root`, changed in place.
        frontier: from `expand_root`; nodes and mask are changed in place, tokens and positions are not read. The
            children of a node that is no candidate yet have score -inf and parent -1.
        seq_lens: [num_slots] int32, L.
        slots: [B] int32. An empty row appends token 0, parent -1, score -inf; its tokens and positions are 0.
        position_offset: as for `expand_root`.
        calibration: as for `expand_root`.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        DraftInputs of the new frontier.

    Raises:
        ValueError: wrong dtype, shape, device or stride; step or k out of range.
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
        stream, topk_ids, topk_logprobs, step, *candidates, nodes, mask, seq_lens, slots, position_offset, calibration,
        *out,
    )  # fmt: skip
    return out


def expand_trellis(
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    num_candidates: int,
    *,
    predecessors: Tensor | None = None,
    successors: Tensor | None = None,
    gates: Tensor | None = None,
    root_tokens: Tensor | None = None,
    id_map: Tensor | None = None,
    calibration: Tensor | None = None,
    width: int = 256,
    out: Candidates | None = None,
    stream: int | None = None,
) -> Candidates:
    """Find the best nodes of the trellis that a block drafter yields in one forward pass.

    The trellis has K candidates at each of D positions; position d is depth d + 1 of the tree. A node is a path through
    it. Its score is the sum of log p along the path, where

        log p(c at d | b at d - 1) = U[d, c] + T[d, b, c] - log(sum over candidates of exp(U + T) + rest[d])

    with the unary log-probabilities U, the transitions T[d, b, c] = sum over r of predecessors[b, r] * gates[d, r] *
    successors[c, r], and rest[d], the probability of all tokens outside the candidates, which transitions do not move.
    Without transitions log p is U: the nodes of a depth have the same children.

    These are the N best of all nodes. They are ordered by score; equal scores go to the lesser depth, then to the
    better parent, then to the earlier candidate. So a parent comes before its children, and fewer nodes are the first
    of more. Calibration applies to each log p before it is added.

    Args:
        topk_ids: [B, D, K] int32, from `select_topk` of the D positions; D is 1 to 16, K is 1 to 64.
        topk_logprobs: [B, D, K] float32; NaN counts as -inf, above 0 as 0.
        num_candidates: N, 1 to 256, without the root.
        predecessors: [V, r] float32, float16 or bfloat16, factors of tokens as predecessors, r up to 4096; or [B, D, K,
            r], those of the candidates of the position before each, gated already (for position 0 row 0 is the root's).
            None: no transitions.
        successors: [Vd, r], factors of draft ids as successors. The factor of an id without a row is zero.
        gates: [B, D, r], for a table of predecessors; the product is rounded to their dtype. None: ones.
        root_tokens: [B] int32, the predecessors of position 0, for a table of predecessors.
        id_map: [Vd] int32, maps `topk_ids`, which are ids of a reduced draft vocabulary then, to the target's ids.
        calibration: [C, 2] float32, C from 1 to 64: the table of a Calibration.
        width: most nodes of a depth, 1 to 256; 1 gives the chain of the best successors.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        Candidates, best first. If there are fewer than N nodes, the others have token 0, parent -1, score -inf.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range; one factor without the other.
    """
    op = "expand_trellis"
    if out is None:
        batch, _, _ = shape_of(op, "topk_ids", topk_ids, 3)
        row = batch, num_candidates
        out = Candidates(
            tokens=empty(op, topk_ids, row, "int32"),
            parents=empty(op, topk_ids, row, "int32"),
            scores=empty(op, topk_ids, row, "float32"),
        )
    elif not isinstance(out, Candidates):
        raise wrong_type(op, "out", out, Candidates)
    _C.expand_trellis(
        stream, topk_ids, topk_logprobs, num_candidates, predecessors, successors, gates, root_tokens, id_map,
        calibration, width, *out,
    )  # fmt: skip
    return out


class Calibration(NamedTuple):
    """Calibration of draft probabilities by depth: logit p' = slope * logit p + offset.

    The last depth also stands for deeper ones. See `make_calibration`.
    """

    table: Tensor  # [D, 2] float32: slope and offset of each depth
    counts: Tensor  # [D, 16, 3] int64: nodes, hits and the sum of logits (in units of 2^-16) in 16 bins of logit p


def make_calibration(num_depths: int, like: Tensor) -> Calibration:
    """Allocate an identity calibration on the device of `like` (torch or NumPy).

    Args:
        num_depths: D, 1 to 64, usually the number of draft steps.
        like: any tensor; gives the library and the device.

    Returns:
        A Calibration of slope 1; all else is 0.

    Raises:
        ValueError: num_depths out of range.
        TypeError: tensors of `like`'s library cannot be allocated here.
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
    """Update the calibration of draft scores from which nodes of a round were accepted.

    A node counts if its parent was emitted and a token followed; it is a hit if that token is its own. Inverting the
    table at the difference between its score and its parent's gives what the draft had predicted, so no other record of
    the round is needed. Each depth gets the most likely slope and offset under a prior at 1 and 0 (Platt scaling). The
    last 8 to 16 thousand nodes count; older ones fade out. The result is the same on CPU and GPU.

    Do not use it for sampled drafts, whose acceptance has another probability, or for trees with nodes from other
    sources.

    Args:
        calibration: changed in place; the one whose table `expand_root` and `expand_tree` got.
        tree: [B, N], of the draft: tokens, parents, positions and num_nodes are read. The verified tree may be another
            one that it was merged into.
        scores: [B, N] float32, of its nodes, 0 for the root. NaN, or a score above the parent's, does not count.
        accepted: as `commit_tokens` left it: nothing is valid in empty, stalled and finished rows. The path is not
            read.
        stream: CUDA stream; None: the current one.

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
        stream, *calibration, tree.tokens, tree.parents, tree.positions, tree.num_nodes, scores, accepted.tokens,
        accepted.num_valid,
    )  # fmt: skip


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
        tokens: [B, S] int32, as `commit_tokens` left them.
        path: [B, S] int32, as `commit_tokens` left it.
        num_valid: [B] int32, from `commit_tokens`.
        prefix_lens: [num_slots] int32, L before the round.
        num_nodes: N of the trees of `path`; no request has more tokens than nodes.
        slots: [B] int32. An empty row has kept_slots = num_slots, and its positions count from 0.
        cu_seqlens_q: [B + 1] int32: `node_rows` numbers node i of request b cu_seqlens_q[b] + i, as `pack_trees` packs
            them. None: b * num_nodes + i.
        position_offset: position of row 0, relative to L.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        DraftExtendInputs.

    Raises:
        ValueError: wrong dtype, shape, device or stride; num_nodes out of range.
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
    """Append a round's draft-extend inputs to each slot's backlog, in a round that skips drafting.

    A backlog is a ring buffer of the last C rows; row i is at i % C. The accepted rows of request b follow the
    backlog_lens[slot] rows of its slot.

    Args:
        tokens: [B, S] int32, as `commit_tokens` left them.
        path: [B, S] int32, as `commit_tokens` left it.
        num_valid: [B] int32, from `commit_tokens`.
        backlog_lens: [num_slots] int32, rows ever appended, overwritten ones included; changed in place.
        backlog_tokens: [num_slots, C] int32, the rings; changed in place.
        features: [B, N, F], or packed [M, F] with cu_seqlens_q; float32, float16 or bfloat16: a row per node. Those on
            `path` are appended. None: tokens only.
        backlog_features: [num_slots, C, F] of features' dtype, changed in place; None without features.
        slots: [B] int32, distinct. An empty row appends nothing.
        cu_seqlens_q: [B + 1] int32: node i of request b has row cu_seqlens_q[b] + i of features. A request without rows
            appends nothing.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride; only one of features and backlog_features.
    """
    _C.append_draft_backlog(
        stream, tokens, path, num_valid, backlog_lens, backlog_tokens, features, backlog_features, slots, cu_seqlens_q
    )
