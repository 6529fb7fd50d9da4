"""KV ops: page allocation, sharing and freeing, and writing, moving and copying KV rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _C
from ._alloc import arange_like, empty, shape_of
from ._tensor import Tensor


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
    """Allocate a pool of `num_pages` free pages on the device of `like` (torch or NumPy); low ids go first.

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
    """Free each slot's pages after the first `prefix_lens[slot]` rows (0: all), or before a sliding window.

    With a window, pages wholly before the last `window` of these rows are freed: no layer with this window reads them
    again. Rows of `slots` are processed in order.

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
    """Give the empty slot `dst_slots[b]` the first `prefix_lens[dst]` rows of slot `src_slots[b]`.

    Use it for several samples of one prompt, or for a common prefix of requests.

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
    """Copy the last rows of a prefix from slot `src_slots[b]` to `dst_slots[b]`, in every layer.

    These are the last `num_rows[b]` of the first `prefix_lens[dst]` KV rows, which `fork_pages` leaves to copy.

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
