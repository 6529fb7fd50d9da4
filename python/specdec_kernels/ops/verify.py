"""Verification ops: logit edits, tree verification, token scores, and committing accepted tokens to slot state."""

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
    """Compute log-probabilities of the tokens that `verify_tree` emitted, from the raw logits that chose them.

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
