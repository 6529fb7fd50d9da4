"""The ops. One thin function each: allocate the outputs that were not passed, call the compiled op positionally.

Conventions: shapes are row-major and contiguous unless said; indices are int32; every op runs on the device of its
tensors (all the same), on the caller's current stream unless `stream=` names another, without synchronising, and is
legal inside a CUDA graph when its outputs are passed. Nothing is converted or copied for the caller: a wrong dtype,
shape, device or stride is a ValueError that names the argument. `requires_grad` is ignored.

Letters: B batch, N tree nodes, S accept row width, k topk, V vocabulary, W mask words (ceil(N / 64)).
`slots[B]` names the slot each row works for (-1: an empty row); None means row b is slot b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from . import _C
from ._alloc import arange_like, empty, shape_of

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
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf.
        k: how many, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        out_ids [R, k] int32, best first, and out_logprobs [R, k] float32, never above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range.
    """
    rows, _ = shape_of("select_topk", "logits", logits, 2)
    if out_ids is None:
        out_ids = empty("select_topk", logits, (rows, k), "int32")
    if out_logprobs is None:
        out_logprobs = empty("select_topk", logits, (rows, k), "float32")
    _C.select_topk(stream, logits, id_map, out_ids, out_logprobs)
    return out_ids, out_logprobs


# --- tree -------------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A batch of draft trees, parents before children, siblings best first; rows that are not nodes repeat the root."""

    tokens: Tensor  # [B, N] int32
    parents: Tensor  # [B, N] int32, -1 at the root
    positions: Tensor  # [B, N] int32, L + depth
    first_child: Tensor  # [B, N] int32, -1 for none
    next_sibling: Tensor  # [B, N] int32, -1 for none
    mask: Tensor  # [B, N, W] int64, bit j of row i: node j is an ancestor of i or i itself
    num_nodes: Tensor  # [B] int32


# --- attention --------------------------------------------------------------------------------------------------------


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
    seed: Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    status: Tensor | None = None,
    out_tokens: Tensor | None = None,
    out_len: Tensor | None = None,
    out_path: Tensor | None = None,
    stream: int | None = None,
) -> Accepted:
    """Keep the longest prefix of each tree that the target itself would have produced, and its own next token.

    Greedy: from the root on, y is the argmax of the node's logits (NaN counts as -inf, ties go to the lowest id). The
    first child that carries y is accepted and visited next; where none does, y is the bonus token and the walk ends.
    A walk of `accept_width` nodes ends with y as the bonus. Only logits of visited nodes are read.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, free strides except the last: the target's logits of every node.
        tree: tokens, parents, first_child, next_sibling and num_nodes are read. A row with num_nodes <= 0 is empty.
        accept_width: S, the width of the emitted rows: the deepest possible node + 1.
        temperature, top_k, top_p, min_p, seed: [num_slots], for sampling; None so far.
        draft_logits, draft_rows: for drafts that were sampled; None so far.
        status: [num_slots] int32. Gains BAD_LOGITS where a row of logits has nothing above -inf (the walk ends without
            a bonus token: nothing at all is emitted when it is the root's), BAD_TREE where a link leaves the tree, does
            not rise or contradicts `parents`, or num_nodes exceeds N (the walk ends with y as the bonus).

    Returns:
        Accepted(tokens, lengths, path). Empty rows: length 0, tokens -1, path 0.

    Raises:
        NotImplementedError: a sampling argument is given.
        ValueError: wrong dtype, shape, device or stride; accept_width < 1.
    """
    batch, _, _ = shape_of("verify_tree", "logits", logits, 3)
    width = max(accept_width, 0)  # a bad width is for the op to name
    if out_tokens is None:
        out_tokens = empty("verify_tree", logits, (batch, width), "int32")
    if out_len is None:
        out_len = empty("verify_tree", logits, (batch,), "int32")
    if out_path is None:
        out_path = empty("verify_tree", logits, (batch, width), "int32")
    _C.verify_tree(
        stream,
        logits,
        tree.tokens,
        tree.parents,
        tree.first_child,
        tree.next_sibling,
        tree.num_nodes,
        accept_width,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        draft_logits,
        draft_rows,
        status,
        out_tokens,
        out_len,
        out_path,
    )
    return Accepted(out_tokens, out_len, out_path)


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
        max_pages: width of a slot's page table: ceil((max_len + reserve) / page_size).
        page_size: KV rows of a page, at least 1.
        like: any tensor; says which library and device.
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
    _C.alloc_pages(stream, *pool, lens, reserve, slots, status)


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
    _C.free_pages(stream, *pool, keep_lens, slots, status)


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
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Write row j of request b to KV row `start_lens[slot] + row_offset + j` of its slot.

    Empty and stalled slots write nothing; a row that has no place of its own is left out, and the status says why.
    Requests of one call must not write the same rows.

    Args:
        k, v: [B, Q, Hkv, D], or packed [T, Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16, free strides except
            the last.
        k_pool, v_pool: [num_pages, page_size, Hkv, D] of the same dtype, free strides except the last; changed in
            place.
        page_table: [num_slots, max_pages] int32.
        start_lens: [num_slots] int32.
        num_valid: [B] int32, how many of the request's rows are written; None for all.
        cu_seqlens_q: [B + 1] int32: request b has the packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH where start_lens is negative, num_valid exceeds the
            rows or cu_seqlens_q leaves the input (no row is written), or a row is outside the page table; BAD_PAGE
            where the row has no page; SHARED_PAGE where its page has more than one owner.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
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
    and the status says why.

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
