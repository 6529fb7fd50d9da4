"""KV ops: allocate, share and free pages; write, move and copy KV rows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .. import _C
from ._alloc import arange_like, as_nhd, empty, range_on_device, shape_of
from ._tensor import Tensor


class PagePool(NamedTuple):
    """Free KV pages and the pages of each slot; one pool serves every layer's tensors. See `make_page_pool`."""

    page_table: Tensor  # [num_slots, max_pages] int32 page ids, -1 for none
    page_counts: Tensor  # [num_slots] int32: the first entries of its row that a slot got pages for
    page_starts: Tensor  # [num_slots] int32: the first of these entries whose page has not been freed by a window
    page_refs: Tensor  # [num_pages] int32: owners of each page, 0 when free
    free_stack: Tensor  # [num_pages] int32: free page ids, the next one to hand out on top
    num_free: Tensor  # [1] int32: height of the stack
    page_size: int


def make_page_pool(num_pages: int, num_slots: int, max_pages: int, page_size: int, like: Tensor) -> PagePool:
    """Allocate a pool of `num_pages` free pages on the device of `like` (torch or NumPy). Low ids are handed out first.

    Args:
        num_pages: pages of the pool, shared by all slots.
        num_slots: rows of the page table.
        max_pages: width of the page table: ceil((max_len + reserve) / page_size).
        page_size: KV rows of a page, at least 1.
        like: any tensor; gives the library and the device.

    Returns:
        A PagePool whose slots have no pages.

    Raises:
        ValueError: page_size below 1.
        TypeError: tensors of `like`'s library cannot be allocated here.
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
    """Allocate the pages that each slot lacks for `seq_lens[slot] + reserve` KV rows.

    Rows of `slots` are served in order. A slot that does not fit gets nothing and is stalled; later ones are still
    tried. A slot named twice is served once.

    Args:
        pool: changed in place.
        seq_lens: [num_slots] int32.
        reserve: rows beyond seq_lens, at least 0.
        slots: [B] int32; None: all slots in order.
        status: [num_slots] int32. STALLED is set if the free pages do not suffice, and cleared if they do. Gains
            BAD_LENGTH if seq_lens is negative, if more than max_pages are needed, or if page_counts is invalid (the
            slot then gets nothing); BAD_PAGE if the free stack held an invalid id.
        stream: CUDA stream; None: the current one.

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
    """Free each slot's pages after its first `prefix_lens[slot]` KV rows (0: all), or before a sliding window.

    With a window, pages wholly before the last `window` of these rows are freed: no layer with this window reads them
    again. Rows of `slots` are served in order.

    A page loses one owner, and is free once it has none. The last page goes first, so the next `alloc_pages` returns
    the same pages in the same order.

    Args:
        pool: changed in place; freed entries become -1.
        prefix_lens: [num_slots] int32, rows to keep; more than the slot has keeps everything.
        window: at least 1: `page_counts` stays and `page_starts` grows. None: pages at the end are freed.
        slots: [B] int32; None: all slots in order.
        status: [num_slots] int32. Gains BAD_LENGTH if prefix_lens is negative or page_counts is invalid (nothing is
            freed), BAD_PAGE if an entry is no page or its page has no owner (it is skipped).
        stream: CUDA stream; None: the current one.

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
    """Give the empty slot `dst_slots[b]` the first `prefix_lens[dst]` KV rows of slot `src_slots[b]`.

    Use it for several samples of one prompt, or for a common prefix of requests.

    Whole pages are shared: they gain an owner, and ops with `page_refs` no longer write them. For a partial page at the
    end the destination gets a page of its own; copy its rows with `copy_kv`, in the pools of target and draft. Rows of
    the call are served in order, but sources are read as they were before the call: a slot that was empty then cannot
    be forked. A source may have many destinations; a destination is served for the first row that names it. A row with
    an empty slot on either side is skipped.

    A stalled fork may be retried. Until it succeeds, do not pass the destination to `alloc_pages`, which would give it
    pages of its own.

    Args:
        pool: changed in place.
        src_slots: [B] int32, B at most 512.
        dst_slots: [B] int32.
        prefix_lens: [num_slots] int32, read at the destinations; usually `seq_lens`, which the caller has set to the
            source's.
        status: [num_slots] int32, set at the destinations. STALLED is set if a partial page finds no free page (the
            destination stays empty), and cleared if the fork succeeds. Gains BAD_LENGTH if the destination is not
            empty, or if prefix_lens is negative or needs more pages than the source has (no fork); BAD_PAGE if an entry
            of the source is no page with an owner (the destination's entry stays -1), or if the free stack held an
            invalid id.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        [B] int32, the `num_rows` of `copy_kv`: rows of the partial page; 0 if there are none or no fork was made.

    Raises:
        ValueError: wrong dtype, shape, device or stride; more than 512 rows.
    """
    if out is None:
        (batch,) = shape_of("fork_pages", "src_slots", src_slots, 1)
        out = empty("fork_pages", src_slots, (batch,), "int32")
    _C.fork_pages(stream, pool, src_slots, dst_slots, prefix_lens, status, out)
    return out


def assign_pages(pool: PagePool, src_entries: Tensor, dst_entries: Tensor, *, stream: int | None = None) -> None:
    """Alias page-table entries to the pages of other entries, with reference counts, as a prefix cache does.

    An entry is an index into the flattened page table, slot * max_pages + i. Its new page gains an owner; its old page
    loses one, and is free once it has none. With entries of unused slots a host can keep the pages of a slot that ends,
    give them to another slot, and release them, without knowing page ids. Sources are read as they were before the
    call; old pages are released in row order. `page_counts` stays.

    Args:
        pool: changed in place.
        src_entries: [B] int32, B at most 512. If out of range (as -1), or without a page that has an owner, the
            destination gets no page (-1).
        dst_entries: [B] int32. If out of range, or named by an earlier row, the row is skipped. An old value that is no
            page with an owner is overwritten, not freed.
        stream: CUDA stream; None: the current one.

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
    layout: Literal["NHD", "HND"] = "NHD",
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Write row j of request b to KV row `prefix_lens[slot] + row_offset + j` of its slot.

    Empty and stalled slots write nothing. A row whose page is missing or shared is skipped, and sets status bits.
    Requests of one call must not write the same rows.

    Args:
        k: [B, Q, Hkv, D], or packed [T, Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16, or float8_e4m3fn for
            such pools; only the last dimension must be contiguous.
        v: like k.
        k_pool: [num_pages, page_size, Hkv, D] of k's dtype or float8_e4m3fn; only the last dimension must be
            contiguous; changed in place.
        v_pool: like k_pool.
        page_table: [num_slots, max_pages] int32.
        prefix_lens: [num_slots] int32.
        row_offset: added to prefix_lens.
        slots: [B] int32.
        num_valid: [B] int32, rows of each request to write. None: all.
        cu_seqlens_q: [B + 1] int32: request b has packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        k_scale: if k is quantized to float8_e4m3fn: k / k_scale is rounded to nearest, ties to even, saturating at 448;
            NaN stays NaN.
        v_scale: the same for v.
        layout: "HND" for pools whose heads come before the rows of a page.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH if prefix_lens is negative, num_valid exceeds the
            rows or cu_seqlens_q leaves the input (no row is written), or if a row is outside the page table; BAD_PAGE
            if a row has no page; SHARED_PAGE if its page has more than one owner.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device, stride or layout; a scale that is not a positive finite float32, or
            given without quantization.
    """
    k_pool, v_pool = as_nhd("write_kv", layout, k_pool, v_pool)
    _C.write_kv(
        stream, k, v, k_pool, v_pool, page_table, prefix_lens, row_offset, slots, num_valid, cu_seqlens_q, page_refs,
        k_scale, v_scale, status,
    )  # fmt: skip


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
    layout: Literal["NHD", "HND"] = "NHD",
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Compact the KV rows of accepted tokens, in every layer.

    Row L + path[b, j] moves to L + j for 1 <= j < num_valid[b], with L = prefix_lens[slot]. Rows already in place are
    not touched. Empty and stalled slots move nothing. An invalid move ends the moves of its request and sets status
    bits.

    Args:
        k_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16; only the last dimension must be
            contiguous; changed in place.
        v_pools: like k_pools.
        page_table: [num_slots, max_pages] int32.
        path: [B, S] int32, from `verify_tree`: starts at 0 and increases strictly over the valid entries.
        num_valid: [B] int32, from `commit_tokens`.
        prefix_lens: [num_slots] int32, L before the round.
        slots: [B] int32, distinct.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        layout: "HND" for pools whose heads come before the rows of a page.
        status: [num_slots] int32. STALLED is read. Gains BAD_TREE if path does not start at 0 or does not increase,
            BAD_LENGTH if num_valid is not in 0..S, L is negative or a row is outside the page table, BAD_PAGE if a row
            has no page, SHARED_PAGE if the destination's page has more than one owner.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device, stride or layout.
    """
    k_pools, v_pools = as_nhd("move_kv", layout, k_pools, v_pools)
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
    layout: Literal["NHD", "HND"] = "NHD",
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Copy the last `num_rows[b]` rows of a prefix from slot `src_slots[b]` to `dst_slots[b]`, in every layer.

    The prefix is the first `prefix_lens[dst]` KV rows; `fork_pages` returns the number of rows to copy. Rows keep their
    index. Rows with an empty slot on either side, and stalled destinations, copy nothing. A KV row without a page on
    either side is skipped, and sets status bits of the destination. Rows of one call must not write what others read or
    write.

    Args:
        k_pools: [layers, num_pages, page_size, Hkv, D] float32, float16 or bfloat16; only the last dimension must be
            contiguous; changed in place.
        v_pools: like k_pools.
        page_table: [num_slots, max_pages] int32.
        src_slots: [B] int32.
        dst_slots: [B] int32.
        prefix_lens: [num_slots] int32, read at the destinations.
        num_rows: [B] int32, from `fork_pages`.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        layout: "HND" for pools whose heads come before the rows of a page.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH if num_rows is not in 0..prefix_lens or prefix_lens
            is beyond the page table (no row is copied), BAD_PAGE if a row has no page, SHARED_PAGE if the destination's
            page has more than one owner.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device, stride or layout.
    """
    k_pools, v_pools = as_nhd("copy_kv", layout, k_pools, v_pools)
    _C.copy_kv(stream, k_pools, v_pools, page_table, src_slots, dst_slots, prefix_lens, num_rows, page_refs, status)


def page_table_of_lists(indptr: Tensor, indices: Tensor, *, max_pages: int | None = None) -> Tensor:
    """Return the page table for lists of pages in CSR form, as FlashInfer's `kv_indptr` and `kv_indices`.

    Args:
        indptr: [B + 1] integers: slot b has `indices[indptr[b]:indptr[b + 1]]`.
        indices: page ids, one list after the other.
        max_pages: width of the table. None: the longest list, which a GPU is waited for. On a GPU longer lists are cut:
            the ops then report BAD_LENGTH for rows beyond the table.

    Returns:
        [B, max_pages] int32, -1 after the end of a list; torch or NumPy as the arguments are.

    Raises:
        ValueError: another number of dimensions; on the CPU, a list longer than max_pages, or indptr that falls, does
            not begin at 0 or does not end at the length of indices.
    """
    op = "page_table_of_lists"
    (ends,), (total,) = shape_of(op, "indptr", indptr, 1), shape_of(op, "indices", indices, 1)
    counts = indptr[1:] - indptr[:-1]
    on_host = not getattr(indptr, "is_cuda", False)
    longest = int(counts.max()) if ends > 1 and (on_host or max_pages is None) else 0
    if on_host:
        least = int(counts.min()) if ends > 1 else 0
        if ends < 1 or int(indptr[0]) != 0 or int(indptr[-1]) != total or least < 0:
            raise ValueError(f"{op}: indptr is no list of ends, expected 0 to {total} (the length of indices), rising")
        if max_pages is not None and longest > max_pages:
            raise ValueError(f"{op}: max_pages is {max_pages}, expected at least {longest} (the longest list)")
    width = longest if max_pages is None else max_pages
    table = empty(op, indices, (max(ends - 1, 0), width), "int32")
    table[...] = -1
    if total == 0 or width == 0:
        return table
    columns = range_on_device(indptr, width)
    used = columns < counts[:, None]
    places = (indptr[:-1, None] + columns).clip(0, total - 1)
    table[...] = indices[places]
    table[~used] = -1
    return table
