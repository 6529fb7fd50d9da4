"""Cases of the kv ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference

from ..compare import bytes_of, expect_equal
from ..harness import Case, Params, Work

PAGE_SIZE = 16
MAX_LEN = 4096
RESERVE = 33  # a round of 32 draft tokens
KV_HEADS, HEAD_DIM = 8, 128
LAYER_ROWS = 64  # of a request's prefix, where only the rows behind it matter


def half_full_pool(batch: int, device: torch.device) -> tuple[sd.PagePool, Tensor]:
    """A pool whose slots hold the pages of their lengths, handed out in random order, and those lengths."""
    max_pages = -(-(MAX_LEN + RESERVE) // PAGE_SIZE)
    pool = sd.make_page_pool(batch * max_pages, batch, max_pages, PAGE_SIZE, torch.empty(0, device=device))
    pool.free_stack.copy_(torch.randperm(batch * max_pages))
    lens = torch.randint(1, MAX_LEN, (batch,), dtype=torch.int32, device=device)
    sd.alloc_pages(pool, lens, 0)
    return pool, lens


def page_op(
    op: Callable[..., None], plain: Callable[..., None], pool: sd.PagePool, lens: Tensor, *reserve: int
) -> Work:
    """One op on a pool, which is put back before every call."""
    *tensors, page_size = pool
    before = [tensor.clone() for tensor in tensors]
    want = sd.PagePool(*(tensor.cpu().clone() for tensor in tensors), page_size)
    plain(want, lens.cpu(), *reserve)
    moved_pages = abs(int(want.num_free) - int(pool.num_free))

    def check() -> None:
        for name, got, expected in zip(sd.PagePool._fields, tensors, want, strict=False):
            # What lies above the stack's height means nothing.
            height = int(want.num_free) if name == "free_stack" else None
            expect_equal(name, got[:height], expected[:height])

    def restore() -> None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    # A page: its stack entry, table entry and owners. A slot: its length, and its count read and written.
    moved = 12 * moved_pages + bytes_of(lens, pool.page_counts, pool.page_counts, pool.num_free, pool.num_free)
    return Work(lambda: op(pool, lens, *reserve), check, moved, restore=restore)


def alloc_pages(device: torch.device, p: Params) -> Work:
    pool, lens = half_full_pool(p["batch"], device)
    return page_op(sd.alloc_pages, reference.alloc_pages, pool, lens, RESERVE)


def free_pages(device: torch.device, p: Params) -> Work:
    """Takes back what a round reserved."""
    pool, lens = half_full_pool(p["batch"], device)
    sd.alloc_pages(pool, lens, RESERVE)
    return page_op(sd.free_pages, reference.free_pages, pool, lens)


def slots_of_rows(batch: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths L, a page table that covers L + rows, and where rows L .. L + rows - 1 lie: [B, rows] in a flat pool."""
    max_pages = -(-(LAYER_ROWS + rows) // PAGE_SIZE)
    table = torch.randperm(batch * max_pages, dtype=torch.int32, device=device).view(batch, max_pages)
    lens = torch.randint(0, LAYER_ROWS, (batch,), dtype=torch.int32, device=device)
    position = lens[:, None].long() + torch.arange(rows, device=device)
    place = table.long().gather(1, position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE
    return lens, table, place


def write_kv(device: torch.device, p: Params) -> Work:
    batch, rows, dtype = p["batch"], p["rows"], getattr(torch, p["dtype"])
    lens, table, place = slots_of_rows(batch, rows, device)
    k, v = (torch.randn(batch, rows, KV_HEADS, HEAD_DIM, device=device).to(dtype) for _ in "kv")
    shape = (table.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pools = [torch.randn(shape, device=device).to(dtype) for _ in "kv"]
    before = [pool.clone() for pool in pools]

    def check() -> None:
        for name, pool, old, new in zip(("k_pool", "v_pool"), pools, before, (k, v), strict=True):
            want = old.clone()
            want.view(-1, KV_HEADS, HEAD_DIM)[place] = new
            expect_equal(name, pool, want)

    return Work(
        call=lambda: sd.write_kv(k, v, *pools, table, lens),
        check=check,
        bytes_moved=2 * bytes_of(k, v) + bytes_of(lens),
    )


def move_kv(device: torch.device, p: Params) -> Work:
    """Three drafts accepted in every request, none of them in place: no call leaves less to do for the next."""
    batch, layers, nodes, dtype = p["batch"], p["layers"], 32, getattr(torch, p["dtype"])
    lens, table, place = slots_of_rows(batch, nodes, device)
    path = torch.stack([torch.randperm(nodes - 2, device=device)[:3].sort().values + 2 for _ in range(batch)])
    path = torch.cat([torch.zeros_like(path[:, :1]), path, path[:, -1:], path[:, -1:]], 1)
    num_valid = torch.full((batch,), 4, dtype=torch.int32, device=device)
    shape = (layers, table.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pools = [torch.randn(shape, device=device).to(dtype) for _ in "kv"]

    def tree_rows(pool: Tensor) -> Tensor:
        return pool.view(layers, -1, KV_HEADS, HEAD_DIM)[:, place]

    before = [tree_rows(pool) for pool in pools]

    def check() -> None:
        for name, pool, old in zip(("k_pools", "v_pools"), pools, before, strict=True):
            want = old.clone()
            for b in range(batch):
                want[:, b, 1:4] = old[:, b, path[b, 1:4]]
            expect_equal(name, tree_rows(pool), want)

    short_path = path.int()
    row_bytes = KV_HEADS * HEAD_DIM * pools[0].element_size()
    return Work(
        call=lambda: sd.move_kv(*pools, table, short_path, num_valid, lens),
        check=check,
        bytes_moved=2 * 2 * layers * batch * 3 * row_bytes + bytes_of(short_path, num_valid, lens),
    )


CASES = [
    Case("alloc_pages", grid={"batch": (1, 8, 64, 256)}, make=alloc_pages),
    Case("free_pages", grid={"batch": (1, 8, 64, 256)}, make=free_pages),
    Case(
        "write_kv",
        grid={"batch": (1, 8, 64), "rows": (6, 32), "dtype": ("bfloat16",)},
        make=write_kv,
    ),
    Case(
        "move_kv",
        grid={"batch": (1, 8, 64), "layers": (36,), "dtype": ("bfloat16",)},
        cpu_grid={"batch": (1, 8), "layers": (4, 36), "dtype": ("bfloat16",)},
        make=move_kv,
    ),
]
