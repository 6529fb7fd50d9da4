"""Cases of the kv ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference

from ..check import bytes_of, expect_equal
from ..harness import Case, Params, Work

PAGE_SIZE = 16
MAX_LEN = 4096
RESERVE = 33  # a round of 32 draft tokens
KV_HEADS, HEAD_DIM = 8, 128
POOL_TENSORS = sd.PagePool._fields[:-1]  # its last field is the page size
LAYER_ROWS = 64  # of a request's prefix, if only the rows after it matter


def half_full_pool(batch: int, device: torch.device) -> tuple[sd.PagePool, Tensor]:
    """Return a pool whose slots own pages for their lengths, in random order, and those lengths."""
    max_pages = -(-(MAX_LEN + RESERVE) // PAGE_SIZE)
    pool = sd.make_page_pool(batch * max_pages, batch, max_pages, PAGE_SIZE, torch.empty(0, device=device))
    pool.free_stack.copy_(torch.randperm(batch * max_pages))
    lens = torch.randint(1, MAX_LEN, (batch,), dtype=torch.int32, device=device)
    sd.alloc_pages(pool, lens, 0)
    return pool, lens


def any_order(batch: int, device: torch.device) -> Tensor:
    """Return all slots, as a round lists them."""
    return torch.randperm(batch, device=device).int()


def copied(pool: sd.PagePool, device: torch.device | None = None) -> sd.PagePool:
    """Return a copy of a pool, on its own device if `device` is None."""
    return pool._replace(**{name: getattr(pool, name).to(device, copy=True) for name in POOL_TENSORS})


def page_op(
    call: Callable[[], object], plain: Callable[[sd.PagePool], object], pool: sd.PagePool, bytes_moved: int
) -> Work:
    """Return a case of an op on a pool that is restored before every call."""
    before = copied(pool)

    def check() -> None:
        want = copied(before, torch.device("cpu"))
        plain(want)
        for name in POOL_TENSORS:
            # Entries above the stack's height are undefined.
            height = int(want.num_free) if name == "free_stack" else None
            expect_equal(name, getattr(pool, name)[:height], getattr(want, name)[:height])

    def restore() -> None:
        for name in POOL_TENSORS:
            getattr(pool, name).copy_(getattr(before, name))

    return Work(call, check, bytes_moved, restore=restore)


def page_bytes(pages: int, rows: Tensor) -> int:
    """Return the bytes of a call that moves pages between the stack and a table.

    Per page: an entry read, one written, an owner count written. Per slot, `rows` of them: its id, its length, its page
    count read and written.
    """
    return 12 * pages + 4 * bytes_of(rows)


def reserved_pages(lens: Tensor) -> int:
    return int((-(-(lens + RESERVE) // PAGE_SIZE) + -lens // PAGE_SIZE).sum())


def alloc_pages(device: torch.device, p: Params) -> Work:
    pool, lens = half_full_pool(p["batch"], device)
    slots, status = any_order(p["batch"], device), torch.zeros_like(lens)
    return page_op(
        lambda: sd.alloc_pages(pool, lens, RESERVE, slots=slots, status=status),
        lambda want: reference.alloc_pages(want, lens.cpu(), RESERVE, slots.cpu()),
        pool,
        page_bytes(reserved_pages(lens), slots),
    )


def free_pages(device: torch.device, p: Params) -> Work:
    """Free what a round reserved."""
    pool, lens = half_full_pool(p["batch"], device)
    slots, status = any_order(p["batch"], device), torch.zeros_like(lens)
    sd.alloc_pages(pool, lens, RESERVE)
    return page_op(
        lambda: sd.free_pages(pool, lens, slots=slots, status=status),
        lambda want: reference.free_pages(want, lens.cpu(), slots.cpu()),
        pool,
        page_bytes(reserved_pages(lens), slots),
    )


def fork_pages(device: torch.device, p: Params) -> Work:
    """Fork up to eight samples of each prompt."""
    batch = p["batch"]
    prompts = -(-batch // 8)
    max_pages = -(-MAX_LEN // PAGE_SIZE)
    pool = sd.make_page_pool(
        prompts * max_pages + batch, prompts + batch, max_pages, PAGE_SIZE, torch.empty(0, device=device)
    )
    pool.free_stack.copy_(torch.randperm(len(pool.free_stack)))
    prompt_lens = torch.randint(1, MAX_LEN, (prompts,), dtype=torch.int32, device=device)
    sources = torch.arange(batch, dtype=torch.int32, device=device) // 8
    targets = torch.arange(prompts, prompts + batch, dtype=torch.int32, device=device)
    fork_lens = prompt_lens[sources.long()]
    lens = torch.cat([prompt_lens, fork_lens])
    sd.alloc_pages(pool, lens, 0, slots=torch.arange(prompts, dtype=torch.int32, device=device))
    status, num_rows = torch.zeros_like(lens), torch.zeros_like(targets)
    # Per shared page of a prompt: its entry read, its owner count read and written. Per fork: its entry written.
    shared = 12 * int((prompt_lens // PAGE_SIZE).sum()) + 4 * int((fork_lens // PAGE_SIZE).sum())
    return page_op(
        lambda: sd.fork_pages(pool, sources, targets, lens, status=status, out=num_rows),
        lambda want: reference.fork_pages(want, sources.cpu(), targets.cpu(), lens.cpu()),
        pool,
        shared + page_bytes(int((fork_lens % PAGE_SIZE > 0).sum()), targets) + bytes_of(sources, num_rows),
    )


def assign_pages(device: torch.device, p: Params) -> Work:
    """Release slots: all their pages move to entries of finished requests."""
    pages = p["rows"] // PAGE_SIZE
    pool = sd.make_page_pool(2 * pages, 2, pages, PAGE_SIZE, torch.empty(0, device=device))
    pool.free_stack.copy_(torch.randperm(2 * pages))
    sd.alloc_pages(pool, torch.tensor([pages * PAGE_SIZE, 0], dtype=torch.int32, device=device), 0)
    sources = torch.randperm(pages, device=device).int()
    targets = pages + torch.randperm(pages, device=device).int()
    return page_op(
        lambda: sd.assign_pages(pool, sources, targets),
        lambda want: reference.assign_pages(want, sources.cpu(), targets.cpu()),
        pool,
        bytes_of(sources, targets) + 20 * pages,  # an entry read, one read and written, an owner count read and written
    )


def slots_of_rows(batch: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths L, a page table for L + rows, and indices [B, rows] of rows L .. L + rows - 1 in a flat pool."""
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
    k_pool, v_pool = (torch.randn(shape, device=device).to(dtype) for _ in "kv")
    k_before, v_before = k_pool.clone(), v_pool.clone()

    def check() -> None:
        for name, pool, old, new in (("k_pool", k_pool, k_before, k), ("v_pool", v_pool, v_before, v)):
            want = old.clone()
            want.view(-1, KV_HEADS, HEAD_DIM)[place] = new
            expect_same(name, pool, want)

    return Work(
        call=lambda: sd.write_kv(k, v, k_pool, v_pool, table, lens),
        check=check,
        bytes_moved=2 * bytes_of(k, v) + bytes_of(lens),
    )


def expect_same(name: str, got: Tensor, want: Tensor) -> None:
    """Compare tensors on their device; `expect_equal` copies them to the host."""
    if not torch.equal(got, want):
        expect_equal(name, got, want)


def move_kv(device: torch.device, p: Params) -> Work:
    """Move three accepted drafts of every request, none of them in place, so that every call does the same work.

    With moves=none all of them are in place, as in a chain.
    """
    batch, layers, nodes, dtype = p["batch"], p["layers"], 32, getattr(torch, p["dtype"])
    lens, table, place = slots_of_rows(batch, nodes, device)
    if p["moves"] == "tree":
        path = torch.stack([torch.randperm(nodes - 2, device=device)[:3].sort().values + 2 for _ in range(batch)])
    else:
        path = torch.arange(1, 4, device=device).repeat(batch, 1)
    path = torch.cat([torch.zeros_like(path[:, :1]), path, path[:, -1:], path[:, -1:]], 1)
    num_valid = torch.full((batch,), 4, dtype=torch.int32, device=device)
    # If nothing moves, layers share their memory: 64 input sets that are never touched would fill it.
    stored = layers if p["moves"] == "tree" else 1
    shape = (stored, table.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k_pools, v_pools = (torch.randn(shape, device=device).to(dtype).expand(layers, -1, -1, -1, -1) for _ in "kv")

    def tree_rows(pool: Tensor) -> Tensor:
        return pool[:stored].view(stored, -1, KV_HEADS, HEAD_DIM)[:, place]

    k_before, v_before = tree_rows(k_pools), tree_rows(v_pools)

    def check() -> None:
        for name, pool, old in (("k_pools", k_pools, k_before), ("v_pools", v_pools, v_before)):
            want = old.clone()
            for b in range(batch):
                want[:, b, 1:4] = old[:, b, path[b, 1:4]]
            expect_same(name, tree_rows(pool), want)

    short_path = path.int()
    row_bytes = KV_HEADS * HEAD_DIM * k_pools.element_size()
    moved = 3 if p["moves"] == "tree" else 0
    return Work(
        call=lambda: sd.move_kv(k_pools, v_pools, table, short_path, num_valid, lens),
        check=check,
        bytes_moved=2 * 2 * layers * batch * moved * row_bytes + bytes_of(short_path, num_valid, lens),
    )


def copy_kv(device: torch.device, p: Params) -> Work:
    """Copy the last rows of a prompt, half a page, to one fork of each."""
    batch, layers, rows, dtype = p["batch"], p["layers"], PAGE_SIZE // 2, getattr(torch, p["dtype"])
    table = torch.randperm(2 * batch, dtype=torch.int32, device=device).view(2 * batch, 1)
    lens, num_rows = (torch.full((n,), rows, dtype=torch.int32, device=device) for n in (2 * batch, batch))
    sources, targets = any_order(2 * batch, device).view(2, batch)
    shape = (layers, 2 * batch, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k_pools, v_pools = (torch.randn(shape, device=device).to(dtype) for _ in "kv")
    k_before, v_before = k_pools.clone(), v_pools.clone()

    def check() -> None:
        for name, pool, want in (("k_pools", k_pools, k_before), ("v_pools", v_pools, v_before)):
            want[:, table[targets.long(), 0].long(), :rows] = want[:, table[sources.long(), 0].long(), :rows]
            expect_same(name, pool, want)

    row_bytes = KV_HEADS * HEAD_DIM * k_pools.element_size()
    return Work(
        call=lambda: sd.copy_kv(k_pools, v_pools, table, sources, targets, lens, num_rows),
        check=check,
        bytes_moved=2 * 2 * layers * batch * rows * row_bytes + bytes_of(table, sources, targets, lens, num_rows),
    )


BATCHES = (1, 8, 64, 256)
CASES = [
    Case("alloc_pages", grid={"batch": BATCHES}, make=alloc_pages),
    Case("free_pages", grid={"batch": BATCHES}, make=free_pages),
    Case("fork_pages", grid={"batch": BATCHES}, make=fork_pages),
    Case("assign_pages", grid={"rows": (PAGE_SIZE, 1024, 8192)}, make=assign_pages),
    Case(
        "write_kv",
        grid={"batch": BATCHES, "rows": (6, 32, 2048), "dtype": ("bfloat16",)},
        cpu_grid={"batch": (1, 8, 64), "rows": (6, 32), "dtype": ("bfloat16",)},
        make=write_kv,
    ),
    Case(
        "move_kv",
        grid={"batch": BATCHES, "layers": (36,), "moves": ("tree", "none"), "dtype": ("bfloat16",)},
        cpu_grid={"batch": (1, 8), "layers": (4, 36), "moves": ("tree", "none"), "dtype": ("bfloat16",)},
        make=move_kv,
    ),
    Case(
        "copy_kv",
        grid={"batch": BATCHES, "layers": (36,), "dtype": ("bfloat16",)},
        cpu_grid={"batch": (1, 8), "layers": (4, 36), "dtype": ("bfloat16",)},
        make=copy_kv,
    ),
]
