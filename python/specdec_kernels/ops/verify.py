"""Verification ops: edit logits, verify trees, score tokens, and commit accepted tokens to the state of slots."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C
from ._alloc import empty, shape_of, wrong_type
from ._tensor import Tensor
from .structs import Accepted, Tree


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
    """Accept each tree's longest path that the target itself would have produced, and emit the next token.

    The walk starts at the root. At each node, y is the target's token; the first child with token y is accepted and
    visited next. Without such a child, or after `accept_width` nodes, y is the bonus token and the walk ends. Logits of
    other nodes have no effect.

    A request of temperature 0 is greedy: y is the argmax of the node's logits (NaN counts as -inf, ties go to the
    lowest id). Otherwise y is sampled from softmax(logits / temperature), restricted to the `top_k` best tokens, of
    these to the best that reach `top_p` of their probability, and of these to tokens at least `min_p` as likely as the
    best one; ties with the last token kept are kept. The sample depends only on the logits, the seed and the absolute
    position of y, so a request's text is the same with any draft, any tree or none (docs/verification.md). Sampling is
    exact to 2^-40 of the best token's probability, and equal on CPU and GPU. A batch may mix greedy and sampled
    requests.

    Candidates that were sampled without replacement from softmax(draft_logits / draft_temperature) are verified by
    rejection sampling instead. The children of a node are tried in order; each is accepted with probability
    min(1, p / q), where p and q are its probabilities in what earlier rejections left of the target's and the draft's
    distribution. If all are rejected, the bonus token is sampled from the rest of the target's distribution. This
    accepts more if the draft is good, and makes the text depend on the drafts as well as on the seed. The tree's shape
    must be fixed before sampling, and siblings must be in draw order: choosing sampled candidates by score biases the
    text. The drafts' noise must be independent of this op's. Greedy requests, and nodes whose children were not
    sampled, are verified as above.

    Source: Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318), rejection sampling; Jeon et al.
    (2402.14160), of several children without replacement; Sun et al. (2403.10444), block verification.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16, the target's logits of
            every node; only the last dimension must be contiguous. N is at most 512 and V at most 2^22.
        tree: everything but the mask is read. A row with num_nodes <= 0 is empty.
        accept_width: S, the width of the emitted rows: the largest depth + 1.
        slots: [B] int32.
        cu_seqlens_q: [B + 1] int32: node i of request b has packed row cu_seqlens_q[b] + i. Trees stay padded.
        temperature: [num_slots] float32; 0 (and below) is greedy. None: all requests are.
        top_k: [num_slots] int32; 0 (and below) is off.
        top_p: [num_slots] float32; 1 (and above) is off.
        min_p: [num_slots] float32; 0 (and below) is off.
        seeds: [num_slots] int64, given with temperature.
        vocab_mask: [B, N, ceil(V / 32)] or packed [M, ceil(V / 32)] int32 bit patterns: bit v % 32 of word v / 32
            allows token v at the node.
        logit_bias: [num_slots, V] float32, rows may be strided: added to the logits first, for greedy requests too.
        draft_logits: [B, Q, Vd] like logits: what candidates were sampled from; given with sampling parameters. Vd = V
            without id_map.
        draft_rows: [B, N] int32, given with draft_logits: the row of draft_logits[b] that a node was sampled from,
            equal for all children of a node; -1 for a node that was not sampled.
        draft_temperature: [num_slots] float32; at 0 (or below) no candidate counts as sampled. None: the request's
            temperature.
        id_map: [Vd] int32, distinct: maps the draft's ids to the target's; V is at most 2^20 then. A child that the
            draft cannot have sampled (not in id_map, of no probability, or equal to an earlier sibling) is skipped.
        block_verification: verify the chain of sampled nodes at the root as one block, which accepts at least as much
            on average. At the first node with several children, or one that was not sampled, the walk continues as
            above. The drafts of a round then need noise that no earlier round used.
        plan: force a kernel on a GPU, for tests and benchmarks: "walk", "at_once" (the tokens of all nodes first,
            faster for few nodes), or with draft_logits "rejection".
        workspace: scratch of at least `verify_tree_workspace` bytes, of any dtype, aligned to 16 bytes. None allocates
            it. Concurrent calls need one each.
        status: [num_slots] int32. Gains BAD_LOGITS if a row of logits has nothing above -inf (the walk ends without a
            bonus token; at the root nothing is emitted). Gains BAD_TREE if a link leaves the tree, does not increase or
            contradicts `parents`, if siblings differ in their draft row or name none of draft_logits, or if num_nodes
            exceeds N or the request's packed rows (the walk ends with a bonus token, if its root has a row).
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        Accepted. Empty rows have num_valid 0, tokens -1, path 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; accept_width < 1; seeds missing, or sampling parameters
            without temperature; draft_rows missing, or draft parameters without draft_logits; a plan that does not
            exist or cannot run the call; a workspace too small.
    """
    op = "verify_tree"
    if not isinstance(tree, Tree):
        raise wrong_type(op, "tree", tree, Tree)
    if out is None:
        shape_of(op, "logits", logits, 3 if cu_seqlens_q is None else 2)
        (batch,) = shape_of(op, "tree.num_nodes", tree.num_nodes, 1)
        width = max(accept_width, 0)  # the op itself refuses a negative width
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
        stream, logits, tree.tokens, tree.parents, tree.positions, tree.first_child, tree.next_sibling, tree.num_nodes,
        accept_width, slots, cu_seqlens_q, temperature, top_k, top_p, min_p, seeds, vocab_mask, logit_bias,
        draft_logits, draft_rows, draft_temperature, id_map, block_verification, plan, workspace, status, *out,
    )  # fmt: skip
    return out


def verify_tree_workspace(
    logits: Tensor,
    *,
    num_nodes: int | None = None,
    temperature: Tensor | None = None,
    draft_logits: Tensor | None = None,
    plan: str | None = None,
) -> int:
    """Return the bytes of workspace that `verify_tree` needs for tensors of these shapes.

    Args:
        logits: as for `verify_tree`, and so are the others; no element is read.
        num_nodes: N of the trees if logits are packed [M, V]; else None.
        temperature: given if requests are sampled.
        draft_logits: given for rejection sampling.
        plan: name of a kernel to force.

    Returns:
        The number of bytes, 0 on the CPU.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a plan that does not exist or cannot run the call.
    """
    size: int = _C.verify_tree_workspace(logits, num_nodes, temperature, draft_logits, plan)
    return size


class LogitEdits(NamedTuple):
    """The logit edits of each slot. See `make_logit_edits`."""

    kinds: Tensor  # [num_slots] int32, bits of Edit; 0: nothing
    bias: Tensor  # [num_slots, V] float32
    counts: Tensor  # [num_slots, V] int32: 2 for each time a token was generated, plus 1 if it is in the prompt
    presence: Tensor  # [num_slots] float32
    frequency: Tensor  # [num_slots] float32
    repetition: Tensor  # [num_slots] float32, above 0


def make_logit_edits(num_slots: int, vocab: int, like: Tensor) -> LogitEdits:
    """Allocate edits that change nothing, on the device of `like` (torch or NumPy): 8 bytes per slot and token.

    Args:
        num_slots: rows of every tensor.
        vocab: V of the target.
        like: any tensor; gives the library and the device.

    Returns:
        A LogitEdits: kinds, bias, counts, presence and frequency are 0, repetition is 1.

    Raises:
        ValueError: num_slots or vocab below 0.
        TypeError: tensors of `like`'s library cannot be allocated here.
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
    """Apply bias, penalties and vocabulary masks to the logits, before `verify_tree`.

    The bits of `edits.kinds[slot]` (see `Edit`) select the edits, which apply in this order; logits of slots without
    bits are not touched.

    BIAS adds the slot's bias.

    PENALTIES concern tokens that were generated n times, in committed text or on the path to the node. If n > 0 or the
    prompt has the token, a logit above 0 is divided by `repetition`, others are multiplied by it (Keskar et al., arXiv
    1909.05858). Then n times `frequency` is subtracted, and `presence` if n > 0.

    MASK sets tokens that `vocab_mask` does not allow to -inf.

    Each step is a float32 operation, and the result is rounded once to the dtype of the logits: 16 bits lose a change
    that is small relative to the logit.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16; only the last dimension
            must be contiguous; changed in place.
        mask: [B, N, W] or packed [M, W] int64 bit patterns, as in Tree: the node of each row and its ancestors.
        tokens: [B, K] int32 tokens of the trees, indexed by the bits of `mask`. Node 0, the root, is committed and not
            counted again.
        edits: of the slots; `commit_tokens` updates its counts.
        vocab_mask: int32 bit patterns, [B, N, ceil(V / 32)] or packed [M, ceil(V / 32)]: bit v % 32 of word v / 32
            allows token v at that node. Rows of slots without MASK are not read. None: no slot has MASK.
        slots: [B] int32.
        cu_seqlens_q: [B + 1] int32: request b has packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        stream: CUDA stream; None: the current one.

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
    """Forbid stop tokens before a minimum length, before `verify_tree`.

    The stop tokens of a slot get logit -inf at every node whose next token has a position before `stops_from[slot]`.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16; only the last dimension
            must be contiguous; changed in place.
        positions: [B, N] or packed [M] int32, of the nodes' tokens.
        stop_tokens: [num_slots, max_stops] int32; ids that are no tokens (-1) are ignored.
        stops_from: [num_slots] int32, the first position where a stop token may be; 0 (and below): anywhere.
        slots: [B] int32.
        cu_seqlens_q: [B + 1] int32: request b has packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride; nodes (all rows if packed) times stop tokens exceed int32.
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
    """Compute log-probabilities of the tokens that `verify_tree` emitted, from the raw logits that chose them.

    Logits of other nodes are not read. A token has log-probability -inf and ids -1 if it is beyond its row's num_valid,
    if its node or id is out of range, or if its request did not ask.

    Args:
        logits: [B, N, V], or packed [M, V] with cu_seqlens_q; float32, float16 or bfloat16; only the last dimension
            must be contiguous. NaN counts as -inf, entries of +inf share the whole probability.
        accepted: from `verify_tree`.
        top_n: best entries to list per token, 0 to min(V, 64); ties go to the lower id.
        slots: [B] int32.
        num_logprobs: [num_slots] int32, entries that each slot asks for; the rest of top_n gets id -1 and -inf. -1 (and
            below): not even its tokens are scored, and their logits are not read. None: all entries of all rows.
        cu_seqlens_q: [B + 1] int32: node i of request b has packed row cu_seqlens_q[b] + i.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        TokenScores; every element is written, and none is above 0.

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
    """State of each slot between rounds: [num_slots] int32 unless said. See `make_slot_state`.

    Ops that take a SlotState advance it in place; the others take its tensors one by one.
    """

    seq_lens: Tensor  # L, committed tokens, whose KV is in rows 0 to L - 1; the root is the token at position L
    prefix_lens: Tensor  # L before the round
    root_tokens: Tensor  # the last emitted token, or the prompt's last
    remaining: Tensor  # tokens that the request may still emit
    max_seq_lens: Tensor  # bound on the sequence, prompt and root included
    stop_tokens: Tensor  # [num_slots, max_stops], -1 for none
    stops_from: Tensor  # the first position where a stop token may be, 0 for anywhere
    temperature: Tensor  # float32; 0 is greedy, and the next four are ignored
    top_k: Tensor  # 0 is off
    top_p: Tensor  # float32, 1 is off
    min_p: Tensor  # float32, 0 is off
    seeds: Tensor  # int64
    num_logprobs: Tensor  # alternatives to list per token; -1: score nothing
    max_nodes: Tensor  # bound on a verified tree, the root included
    finish_reasons: Tensor  # values of FinishReason, 0 while the request runs
    status: Tensor  # bits of Status


def make_slot_state(num_slots: int, max_seq_len: int, max_stops: int, like: Tensor) -> SlotState:
    """Allocate slots that are empty and greedy, on the device of `like` (torch or NumPy).

    Args:
        num_slots: rows of every tensor.
        max_seq_len: initial `max_seq_lens` of every slot.
        max_stops: width of `stop_tokens`, filled with -1; may be 0.
        like: any tensor; gives the library and the device.

    Returns:
        A SlotState: top_p is 1, num_logprobs is -1, max_nodes is 256, all else but the above is 0.

    Raises:
        ValueError: num_slots or max_stops below 0.
        TypeError: tensors of `like`'s library cannot be allocated here.
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
    """Truncate the tokens of `verify_tree` at a stop token or a limit, and advance the slots by the rest.

    A row is truncated after its first stop token; at `remaining` tokens; and where the sequence, root included, would
    exceed `max_seq_lens`. Then with n = num_valid and L = seq_lens[slot]: prefix_lens = L, seq_lens = L + n,
    root_tokens = the last token kept, remaining -= n. If several finish reasons coincide, STOP precedes LENGTH, and
    LENGTH CONTEXT. Empty rows, finished slots and stalled ones emit nothing and keep their state, except that
    prefix_lens = seq_lens. A running slot with n = 0 does not advance.

    Args:
        accepted: tokens [B, S] and num_valid [B] are changed in place; tokens after the cut become -1.
        state: stop_tokens and max_seq_lens are read; seq_lens, prefix_lens, root_tokens, remaining and finish_reasons
            are changed in place. STALLED of status is read; status gains BAD_LENGTH if num_valid is not in 0..S or
            seq_lens is negative (the row then emits nothing).
        counts: [num_slots, V] int32 of LogitEdits: each emitted token adds 2. None: tokens are not counted.
        slots: [B] int32, distinct.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        [B] int32: num_valid if the slot continues, else 0; the input of `move_kv` and draft-extend.

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
        stream, accepted.tokens, accepted.num_valid, state.stop_tokens, state.remaining, state.max_seq_lens,
        state.seq_lens, state.prefix_lens, state.root_tokens, state.finish_reasons, slots, state.status, counts, out,
    )  # fmt: skip
    return out
