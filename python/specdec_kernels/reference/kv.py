"""References of the KV ops: sequential, in place on CPU tensors, for valid inputs unless stated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops import PagePool
from ..status import Status


def working_rows(slots: Tensor | None, num_slots: int, batch: int) -> Iterator[tuple[int, int]]:
    """Yield (row, slot) of the non-empty rows."""
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if 0 <= slot < num_slots:
            yield b, slot


def pages_for(rows: int, page_size: int) -> int:
    return -(-rows // page_size)


def alloc_pages(
    pool: PagePool, seq_lens: Tensor, reserve: int, slots: Tensor | None = None, status: Tensor | None = None
) -> None:
    num_slots, max_pages = pool.page_table.shape
    for _, slot in working_rows(slots, num_slots, num_slots if slots is None else len(slots)):
        held = int(pool.page_counts[slot])
        wanted = pages_for(int(seq_lens[slot]) + reserve, pool.page_size)
        free = int(pool.num_free)
        if seq_lens[slot] < 0 or wanted > max_pages:
            if status is not None:
                status[slot] |= int(Status.BAD_LENGTH)
            continue
        stalled = wanted - held > free
        if status is not None:
            status[slot] = int(status[slot]) & ~Status.STALLED | (Status.STALLED if stalled else 0)
        if stalled:
            continue
        for i in range(held, wanted):
            free -= 1
            page = int(pool.free_stack[free])
            pool.page_table[slot, i] = page
            pool.page_refs[page] = 1
        pool.num_free[0] = free
        pool.page_counts[slot] = max(held, wanted)


def free_pages(
    pool: PagePool,
    prefix_lens: Tensor,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    window: int | None = None,
) -> None:
    """Free pages. Table entries that are no pages, and pages without owner, are allowed."""
    num_slots = pool.page_table.shape[0]
    num_pages = len(pool.page_refs)
    for _, slot in working_rows(slots, num_slots, num_slots if slots is None else len(slots)):
        if prefix_lens[slot] < 0:
            if status is not None:
                status[slot] |= int(Status.BAD_LENGTH)
            continue
        start, count = int(pool.page_starts[slot]), int(pool.page_counts[slot])
        if window is None:
            kept = min(count, pages_for(int(prefix_lens[slot]), pool.page_size))
            freed = range(max(start, kept), count)
            pool.page_counts[slot], pool.page_starts[slot] = kept, min(start, kept)
        else:
            expired = max(0, int(prefix_lens[slot]) - window) // pool.page_size
            freed = range(start, min(expired, count))
            pool.page_starts[slot] = max(start, min(expired, count))
        for i in reversed(freed):
            page = int(pool.page_table[slot, i])
            pool.page_table[slot, i] = -1
            if not 0 <= page < num_pages or pool.page_refs[page] <= 0:
                if status is not None:
                    status[slot] |= int(Status.BAD_PAGE)
                continue
            pool.page_refs[page] -= 1
            if pool.page_refs[page] == 0:
                pool.free_stack[int(pool.num_free)] = page
                pool.num_free[0] += 1


def fork_pages(
    pool: PagePool, src_slots: Tensor, dst_slots: Tensor, prefix_lens: Tensor, status: Tensor | None = None
) -> Tensor:
    """Fork pages. Table entries that are no pages, and pages without owner, are allowed."""
    num_slots = pool.page_table.shape[0]
    num_pages = len(pool.page_refs)
    counts_before = pool.page_counts.tolist()
    num_rows = torch.zeros_like(src_slots)
    served = set()

    def report(slot: int, bit: Status) -> None:
        if status is not None:
            status[slot] |= int(bit)

    for b, src in working_rows(src_slots, num_slots, len(src_slots)):
        dst = int(dst_slots[b])
        if not 0 <= dst < num_slots or dst in served:
            continue
        served.add(dst)
        rows = int(prefix_lens[dst])
        if counts_before[dst] != 0 or rows < 0 or pages_for(rows, pool.page_size) > counts_before[src]:
            report(dst, Status.BAD_LENGTH)
            continue
        partial = rows % pool.page_size
        free = int(pool.num_free)
        if partial and free == 0:
            report(dst, Status.STALLED)
            continue
        if status is not None:
            status[dst] &= ~Status.STALLED
        whole = rows // pool.page_size
        first = min(whole, int(pool.page_starts[src]))
        for i in range(first, whole):
            page = int(pool.page_table[src, i])
            if 0 <= page < num_pages and pool.page_refs[page] > 0:
                pool.page_table[dst, i] = page
                pool.page_refs[page] += 1
            else:
                pool.page_table[dst, i] = -1
                report(dst, Status.BAD_PAGE)
        if partial:
            page = int(pool.free_stack[free - 1])
            pool.num_free[0] = free - 1
            pool.page_table[dst, whole] = page
            pool.page_refs[page] = 1
        pool.page_counts[dst], pool.page_starts[dst] = whole + (partial > 0), first
        num_rows[b] = partial
    return num_rows


def assign_pages(pool: PagePool, src_entries: Tensor, dst_entries: Tensor) -> None:
    """Assign pages. Table entries that are no pages, and pages without owner, are allowed."""
    num_pages, table = len(pool.page_refs), pool.page_table.view(-1)
    before, owned = table.tolist(), (pool.page_refs > 0).tolist()
    pages: dict[int, int] = {}  # of each destination, in the order of the rows
    for src, dst in zip(src_entries.tolist(), dst_entries.tolist(), strict=True):
        if 0 <= dst < len(before) and dst not in pages:
            page = before[src] if 0 <= src < len(before) else -1
            pages[dst] = page if 0 <= page < num_pages and owned[page] else -1
            if pages[dst] >= 0:
                pool.page_refs[page] += 1
    for dst, page in pages.items():
        old = before[dst]
        table[dst] = page
        if 0 <= old < num_pages and pool.page_refs[old] > 0:
            pool.page_refs[old] -= 1
            if pool.page_refs[old] == 0:
                pool.free_stack[int(pool.num_free)] = old
                pool.num_free[0] += 1


def row_address(page_table: Tensor, slot: int, row: int, page_size: int) -> tuple[int, int]:
    """Return the page of a slot's KV row, and the row's index in that page."""
    return int(page_table[slot, row // page_size]), row % page_size


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    page_size = k_pool.shape[1]
    if k.dtype != k_pool.dtype:
        k, v = ((x.float() / scale).clamp(-448, 448).to(k_pool.dtype) for x, scale in ((k, k_scale), (v, v_scale)))
    batch = len(k) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for b, slot in working_rows(slots, len(prefix_lens), batch):
        rows = b if cu_seqlens_q is None else slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        k_rows, v_rows = k[rows], v[rows]
        for j in range(len(k_rows) if num_valid is None else int(num_valid[b])):
            at = row_address(page_table, slot, int(prefix_lens[slot]) + row_offset + j, page_size)
            k_pool[at], v_pool[at] = k_rows[j], v_rows[j]


def move_kv(
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    path: Tensor,
    num_valid: Tensor,
    prefix_lens: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Move rows; all rows of a request are read before any is written."""
    page_size = k_pools.shape[2]
    for b, slot in working_rows(slots, len(prefix_lens), len(path)):
        start, count = int(prefix_lens[slot]), int(num_valid[b])
        sources = [row_address(page_table, slot, start + int(node), page_size) for node in path[b, :count]]
        for pools in (k_pools, v_pools):
            rows = [pools[:, page, row].clone() for page, row in sources]
            for j in range(count):
                page, row = row_address(page_table, slot, start + j, page_size)
                pools[:, page, row] = rows[j]


def copy_kv(
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    num_rows: Tensor,
) -> None:
    page_size = k_pools.shape[2]
    for b, src in working_rows(src_slots, len(prefix_lens), len(src_slots)):
        dst = int(dst_slots[b])
        if not 0 <= dst < len(prefix_lens):
            continue
        for row in range(int(prefix_lens[dst]) - int(num_rows[b]), int(prefix_lens[dst])):
            source, target = (row_address(page_table, slot, row, page_size) for slot in (src, dst))
            for pools in (k_pools, v_pools):
                pools[(slice(None), *target)] = pools[(slice(None), *source)]
