"""alloc_pages and free_pages: each rule in a worked example. Random sequences are in test_page_sequences.py."""

from __future__ import annotations

import inspect

import pytest
import torch

import specdec_kernels as sd
from support.op_calls import calls
from support.page_pools import TwoPools
from support.paged import INT

STALLED, BAD_PAGE, BAD_LENGTH = (int(bit) for bit in (sd.Status.STALLED, sd.Status.BAD_PAGE, sd.Status.BAD_LENGTH))


def draw(low: int, high: int, count: int) -> list[int]:
    return torch.randint(low, high, (count,)).tolist()


@pytest.mark.sanitize
def test_pages_are_allocated_and_freed(device: torch.device) -> None:
    pools = TwoPools(device, 5, 3, 4, 2)
    pools.alloc([1, 3, 5], 1, [2, 0, 2, -1, 1])
    pools.assert_conserved()
    pools.free([0, 0, 3], [2, 0])
    pools.assert_conserved()


def test_alloc_pages_takes_lowest_pages_first_then_last_freed(device: torch.device) -> None:
    pools = TwoPools(device, 8, 2, 8, 4)
    pools.alloc([9, 5], 3)
    assert pools.table(0) == [0, 1, 2] and pools.table(1) == [3, 4]
    pools.free([4, 0])
    assert pools.table(0) == [0] and pools.table(1) == []
    pools.alloc([4, 12])
    assert pools.table(1) == [3, 4, 1], "slot 1's own pages in their old order, then slot 0's"


def test_alloc_pages_stalls_slot_that_does_not_fit_and_tries_later_ones(device: torch.device) -> None:
    pools = TwoPools(device, 4, 3, 4, 1)
    pools.alloc([2, 3, 2])
    assert [len(pools.table(slot)) for slot in range(3)] == [2, 0, 2]
    assert pools.status.tolist() == [0, STALLED, 0]
    pools.alloc([2, 0, 2])  # the pages it holds suffice now
    assert pools.status.tolist() == [0, 0, 0]
    pools.alloc([2, 1, 2], slots=[1])
    assert pools.status.tolist() == [0, STALLED, 0]
    pools.free([0, 0, 2])
    pools.alloc([2, 1, 2], slots=[1])
    assert pools.status.tolist() == [0, 0, 0] and pools.table(1) == [0]


def test_alloc_pages_serves_slots_in_given_order(device: torch.device) -> None:
    pools = TwoPools(device, 3, 3, 3, 1)
    pools.alloc([1, 1, 1], slots=[2, -1, 0, 2, 1])
    assert [pools.table(slot) for slot in range(3)] == [[1], [2], [0]]


def test_free_pages_with_window_frees_pages_before_it(device: torch.device) -> None:
    pools = TwoPools(device, 9, 2, 9, 4)
    pools.alloc([20, 16])
    assert (pools.table(0), pools.table(1)) == ([0, 1, 2, 3, 4], [5, 6, 7, 8])
    pools.free([11, 20], window=8)  # the next token of slot 0 still sees row 3
    assert (pools.held(0), pools.held(1)) == (range(5), range(3, 4))
    pools.free([12, 20], window=8)
    assert pools.held(0) == range(1, 5)
    pools.free([17, 0], [0, 0, 1], window=8)
    assert (pools.table(0), pools.num_free()) == ([2, 3, 4], 5)
    pools.alloc([28, 24], slots=[0, 1])  # entries before the window stay empty; the rest fills until no page is left
    assert (pools.held(0), pools.held(1)) == (range(2, 7), range(3, 6))
    pools.free([2**31 - 1, -1], window=1)
    assert (pools.table(0), pools.status.tolist()) == ([], [0, BAD_LENGTH])
    pools.alloc([30, 24])
    pools.free([25, 4])  # slot 0 has no row before 12 any more
    assert (pools.held(0), pools.held(1)) == (range(7, 7), range(1, 1))
    pools.assert_conserved()
    pools.free([0, 0])
    pools.alloc([8, 0])
    assert pools.held(0) == range(2) and pools.num_free() == 7


@pytest.mark.sanitize
@pytest.mark.parametrize("start", [-1, 3, 2**31 - 1])
def test_free_pages_of_invalid_starts_stays_in_bounds(device: torch.device, start: int) -> None:
    pools = TwoPools(device, 9, 2, 3, 1)
    pools.alloc([2, 2])
    pools.pool.page_starts[0] = start
    lens = torch.tensor([3, 2], dtype=INT, device=device)
    sd.free_pages(pools.pool, lens, window=1, status=pools.status)
    assert pools.pool.page_starts.tolist() == [2, 1]
    assert pools.pool.page_table.tolist() == [[-1, -1, -1] if start < 0 else [0, 1, -1], [-1, 3, -1]]
    assert pools.status.tolist() == [0, 0]


def test_pages_of_a_repeated_slot_are_served_once(device: torch.device) -> None:
    pools = TwoPools(device, 4, 2, 3, 1)
    pools.alloc([2, 3], slots=[0, 1, 0, 1])
    assert pools.table(0) == [0, 1] and pools.table(1) == []
    pools.free([1, 0], slots=[0, 0])
    assert pools.table(0) == [0] and pools.num_free() == 3


def test_pages_of_more_rows_than_block_threads(device: torch.device) -> None:
    pools = TwoPools(device, 1500, 700, 5, 2)
    order = torch.randperm(700).tolist()
    pools.alloc(draw(0, 9, 700), 1, order + order[:300])
    pools.assert_conserved()
    assert STALLED in pools.status.tolist()
    pools.free(draw(0, 9, 700), order[350:] + order)
    pools.assert_conserved()


def test_pages_of_many_pages_in_one_call(device: torch.device) -> None:
    pools = TwoPools(device, 1000, 3, 700, 1)
    pools.alloc([650, 200, 0])
    pools.fork([0], [2], [650, 200, 650])
    pools.free([3, 199, 333])
    pools.assert_conserved()
    pools.free([0, 0, 0], [2, 1, 0])
    pools.assert_conserved()
    assert pools.num_free() == 1000


def test_free_pages_by_all_owners_in_one_call(device: torch.device) -> None:
    """More pages than a block has threads; the page's last owner in row order pushes it."""
    pools = TwoPools(device, 500, 7, 400, 1)
    pools.alloc([310, 0, 0, 0, 0, 100, 0])
    pools.fork([0, 0, 5, 0], [1, 2, 6, 4], [0, 310, 200, 0, 77, 0, 55])
    pools.free([0, 100, 0, 0, 70, 10, 0], [4, 0, 6, 2, 5, 1, 0])
    pools.assert_conserved()
    assert pools.num_free() == 500 - 100 - 10


@pytest.mark.sanitize
def test_pages_of_bad_lengths_change_nothing(device: torch.device) -> None:
    pools = TwoPools(device, 9, 5, 2, 3)
    lens = [-1, 7, 2**31 - 1, -(2**31), 6]
    pools.alloc(lens)
    assert pools.status.tolist() == [BAD_LENGTH] * 4 + [0]
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]
    pools.alloc([6, 6, 6, 6, 2**31 - 1], 2**31 - 1, [4])
    assert pools.status.tolist() == [BAD_LENGTH] * 5
    pools.free([0, 0, 0, 0, -1])
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]
    pools.free([0, 0, 0, 0, 2**31 - 1])  # keeps everything
    assert pools.pool.page_counts.tolist() == [0, 0, 0, 0, 2]


@pytest.mark.sanitize
@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1, -(2**31)])
def test_pages_of_bad_counts_stay_in_bounds(device: torch.device, count: int) -> None:
    pools = TwoPools(device, 9, 2, 3, 1)
    pools.pool.page_counts[0] = count
    lens = torch.tensor([2, 2], dtype=INT, device=device)
    sd.alloc_pages(pools.pool, lens, 0, status=pools.status)
    sd.free_pages(pools.pool, lens, status=pools.status)
    assert pools.status.tolist() == [BAD_LENGTH, 0]
    assert pools.pool.page_table.tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert pools.pool.page_counts.tolist() == [count, 2]


@pytest.mark.sanitize
def test_free_pages_skips_invalid_table_entries(device: torch.device) -> None:
    pools = TwoPools(device, 60, 2, 50, 1)
    pools.alloc([45, 5])
    pools.set_entry(0, 1, -1)
    pools.set_entry(0, 2, 60)
    pools.set_entry(0, 40, 2**31 - 1)
    pools.set_entry(0, 7, 6)  # page 6 twice: no owner is left the second time
    pools.set_entry(0, 3, 44)  # and a page freed before its turn
    pools.free([0, 5])
    assert pools.status.tolist() == [BAD_PAGE, 0]
    assert pools.table(0) == []


@pytest.mark.sanitize
def test_free_pages_frees_page_listed_twice_after_both_owners(device: torch.device) -> None:
    pools = TwoPools(device, 9, 3, 8, 1)
    pools.alloc([4, 0, 0])
    pools.fork([0], [1], [0, 4, 0])
    pools.set_entry(0, 3, 2)  # slot 0 releases page 2 twice, slot 1 finds no owner
    pools.free([0, 0, 0], [0, 1])
    assert pools.status.tolist() == [0, BAD_PAGE, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize("num_free", [-3, 9, 2**31 - 1])
def test_pages_of_invalid_stack_stay_in_bounds(device: torch.device, num_free: int) -> None:
    pool = sd.make_page_pool(4, 2, 3, 1, torch.empty(0, device=device))
    pool.num_free[0] = num_free
    pool.free_stack[2:] = torch.tensor([-5, 2**31 - 1], dtype=INT)
    status = torch.zeros(2, dtype=INT, device=device)
    lens = torch.tensor([3, 1], dtype=INT, device=device)
    sd.alloc_pages(pool, lens, 0, status=status)
    if num_free < 0:
        assert status.tolist() == [STALLED, STALLED]
    else:
        assert status.tolist() == [BAD_PAGE, 0]
        assert pool.page_table.tolist() == [[-1, -1, 2], [3, -1, -1]]
    pool.num_free[0] = num_free
    sd.free_pages(pool, torch.zeros_like(lens), status=status)
    assert 0 <= int(pool.num_free) <= 4


def test_pages_accept_empty_batch_and_no_slots(device: torch.device) -> None:
    like = torch.empty(0, device=device)
    pool = sd.make_page_pool(4, 0, 3, 1, like)
    nothing = torch.empty(0, dtype=INT, device=device)
    sd.alloc_pages(pool, nothing, 1)
    sd.free_pages(pool, nothing)
    pool = sd.make_page_pool(4, 2, 3, 1, like)
    sd.alloc_pages(pool, torch.ones(2, dtype=INT, device=device), 1, slots=nothing)
    assert int(pool.num_free) == 4


def test_page_pool_accepts_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    pool = sd.make_page_pool(4, 2, 3, 2, np.empty(0))
    sd.alloc_pages(pool, np.array([1, 3], np.int32), 0)
    assert pool.page_table.tolist() == [[0, -1, -1], [1, 2, -1]]
    assert type(pool.free_stack) is np.ndarray and pool.num_free.tolist() == [1]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("alloc_pages", {"seq_lens": torch.zeros(3, dtype=INT)}, "alloc_pages: seq_lens has shape [3], expected [num_slots=2]"),
        ("alloc_pages", {"seq_lens": torch.zeros(2)}, "alloc_pages: seq_lens is float32, expected int32"),
        ("alloc_pages", {"reserve": -1}, "alloc_pages: reserve is -1, expected 0 to 2147483647"),
        ("alloc_pages", {"free_stack": torch.zeros(5, dtype=INT)}, "alloc_pages: free_stack has shape [5], expected [num_pages=4]"),
        ("alloc_pages", {"page_table": torch.zeros(3, 2, dtype=INT).t()}, "alloc_pages: page_table has shape [2, 3] and is not contiguous, expected a contiguous tensor"),
        ("alloc_pages", {"page_size": 0}, "alloc_pages: page_size is 0, expected 1 to 2147483647"),
        ("free_pages", {"prefix_lens": torch.zeros(1, dtype=INT)}, "free_pages: prefix_lens has shape [1], expected [num_slots=2]"),
        ("free_pages", {"page_starts": torch.zeros(3, dtype=INT)}, "free_pages: page_starts has shape [3], expected [num_slots=2]"),
        ("free_pages", {"window": 0}, "free_pages: window is 0, expected 1 to 2147483647"),
        ("free_pages", {"num_free": torch.zeros(2, dtype=INT)}, "free_pages: num_free has shape [2], expected [1]"),
        ("free_pages", {"status": torch.zeros(1, dtype=INT)}, "free_pages: status has shape [1], expected [num_slots=2]"),
        ("free_pages", {"slots": torch.zeros(2, 1, dtype=INT)}, "free_pages: slots has shape [2, 1], expected [batch]"),
    ],
)  # fmt: skip
def test_pages_error_messages(op: str, change: dict[str, object], message: str) -> None:
    pool = sd.make_page_pool(4, 2, 3, 1, torch.empty(0))
    pool = pool._replace(**{name: change.pop(name) for name in list(change) if name in sd.PagePool._fields})
    lens = torch.zeros(2, dtype=INT)
    arguments = {"seq_lens": lens, "reserve": 0} if op == "alloc_pages" else {"prefix_lens": lens}
    with pytest.raises(ValueError) as error:
        getattr(sd, op)(pool, **(arguments | change))
    assert str(error.value) == message


def test_make_page_pool_refuses_bad_page_size() -> None:
    with pytest.raises(ValueError) as error:
        sd.make_page_pool(4, 2, 3, 0, torch.empty(0))
    assert str(error.value) == "make_page_pool: page_size is 0, expected at least 1"


@pytest.mark.parametrize("op", ["write_kv", "move_kv", "copy_kv", "rope_qkv_write_kv"])
def test_kv_ops_of_hnd_pools_equal_nhd(op: str, device: torch.device) -> None:
    for flat, options in calls(op, device):
        names = list(inspect.signature(getattr(sd, op)).parameters)[: len(flat)]
        arguments = dict(zip(names, flat, strict=True)) | options
        pools = [name for name in arguments if name.endswith(("_pool", "_pools"))]
        assert len(pools) == 2
        hnd = arguments | {name: arguments[name].swapaxes(-3, -2).contiguous() for name in pools}
        if op == "move_kv":  # a path that moves rows
            path = torch.tensor([[0, 2, 3]] * 2, dtype=INT, device=device)
            for each in (arguments, hnd):
                each |= {"path": path, "num_valid": torch.full_like(path[:, 0], 3)}
        before = arguments[pools[0]].clone()
        for each, layout in ((arguments, "NHD"), (hnd, "HND")):
            getattr(sd, op)(**each, layout=layout)
        assert not torch.equal(arguments[pools[0]], before)
        for name in pools:
            assert torch.equal(hnd[name].swapaxes(-3, -2), arguments[name])
