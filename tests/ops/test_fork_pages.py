"""fork_pages: each rule in a worked example. Random calls: test_page_sequences.py; copying: test_copy_kv.py."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from support.page_pools import TwoPools
from support.paged import INT

STALLED, BAD_PAGE, BAD_LENGTH = (int(bit) for bit in (sd.Status.STALLED, sd.Status.BAD_PAGE, sd.Status.BAD_LENGTH))


@pytest.mark.sanitize
def test_fork_pages_shares_full_pages_and_allocates_partial_one(device: torch.device) -> None:
    pools = TwoPools(device, 9, 4, 4, 4)
    pools.alloc([9, 0, 0, 0], 6, [0])  # four pages; nine rows fill two of them and start a third
    assert pools.fork([0, 0, 0], [1, 3, 2], [9, 9, 8, 3]) == [1, 3, 0]
    assert [pools.table(slot) for slot in range(4)] == [[0, 1, 2, 3], [0, 1, 4], [0, 1], [5]]
    assert pools.pool.page_refs.tolist() == [3, 3, 1, 1, 1, 1, 0, 0, 0]
    pools.assert_conserved()
    pools.alloc([9, 9, 8, 3], 4)
    assert pools.table(1) == [0, 1, 4, 6] and pools.table(2) == [0, 1, 7], "what they write is their own"
    pools.free([0, 9, 0, 0])
    assert pools.table(1) == [0, 1, 4] and pools.pool.page_refs.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0]
    pools.assert_conserved()


def test_fork_pages_keeps_pages_of_a_released_source(device: torch.device) -> None:
    pools = TwoPools(device, 4, 3, 2, 1)
    pools.alloc([2, 0, 0])
    pools.fork([0], [1], [0, 2, 0])
    pools.free([0, 2, 0])
    pools.fork([1], [0], [1, 0, 0])
    assert pools.table(0) == [0] and pools.table(1) == [0, 1]
    pools.free([0, 0, 0])
    assert pools.num_free() == 4


@pytest.mark.sanitize
def test_fork_pages_stalls_fork_without_free_page_and_tries_later_ones(device: torch.device) -> None:
    pools = TwoPools(device, 4, 5, 3, 2)
    pools.alloc([5, 0, 0, 0, 0])
    lens = [0, 5, 3, 4, 1]
    assert pools.fork([0] * 4, [1, 2, 3, 4], lens) == [1, 0, 0, 0]
    assert pools.status.tolist() == [0, 0, STALLED, 0, STALLED]
    assert [pools.table(slot) for slot in range(1, 5)] == [[0, 1, 3], [], [0, 1], []]
    pools.free([4, 5, 0, 4, 0])
    assert pools.fork([0] * 2, [4, 2], [4, 0, 3, 0, 1]) == [1, 0]
    assert pools.status.tolist() == [0, 0, STALLED, 0, 0]
    pools.assert_conserved()


def test_fork_pages_reads_sources_as_before_the_call(device: torch.device) -> None:
    pools = TwoPools(device, 4, 4, 2, 1)
    pools.alloc([1, 0, 0, 0])
    pools.fork([0, 1, 3], [1, 2, 3], [0, 1, 1, 0])
    assert [pools.table(slot) for slot in range(4)] == [[0], [0], [], []]
    assert pools.status.tolist() == [0, 0, BAD_LENGTH, 0], "forking zero rows of an empty slot succeeds"


def test_fork_pages_uses_first_row_of_a_repeated_destination(device: torch.device) -> None:
    pools = TwoPools(device, 4, 3, 2, 1)
    pools.alloc([1, 2, 0])
    pools.fork([7, 1, 0, 1], [2, 2, 2, -1], [0, 0, 1])
    assert pools.table(2) == [1]
    assert pools.status.tolist() == [0, 0, 0]


@pytest.mark.sanitize
def test_fork_pages_refused_rows_change_nothing(device: torch.device) -> None:
    pools = TwoPools(device, 6, 6, 2, 2)
    pools.alloc([3, 3, 0, 0, 0, 0])
    assert pools.fork([0, 0, 0, 0, 2], [1, 2, 3, 4, 5], [3, 3, -1, 5, 2**31 - 1, 1]) == [0] * 5
    assert pools.status.tolist() == [0] + [BAD_LENGTH] * 5
    assert pools.pool.page_counts.tolist() == [2, 2, 0, 0, 0, 0]
    pools.assert_conserved()


@pytest.mark.sanitize
def test_fork_pages_skips_invalid_pages(device: torch.device) -> None:
    pools = TwoPools(device, 9, 3, 7, 1)
    pools.alloc([6, 0, 0])
    for index, wild in ((1, -1), (2, 9), (3, 2**31 - 1), (4, 8)):  # 8 has no owner
        pools.set_entry(0, index, wild)
    pools.fork([0], [2], [0, 0, 6])
    assert pools.table(2) == [0, -1, -1, -1, -1, 5]
    assert pools.status.tolist() == [0, 0, BAD_PAGE]


def test_fork_pages_of_largest_call(device: torch.device) -> None:
    """The most forks that one call accepts, of more pages than a block has threads."""
    pools = TwoPools(device, 1000, 600, 50, 3)
    pools.alloc([140, 97, 0, 31] + [0] * 596)
    lens = torch.randint(0, 31, (600,)).tolist()
    pools.fork(torch.randint(0, 4, (512,)).tolist(), (torch.randperm(596)[:512] + 4).tolist(), lens)
    pools.assert_conserved()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_slots": torch.zeros(2)}, "fork_pages: src_slots is float32, expected int32"),
        ({"dst_slots": torch.zeros(3, dtype=INT)}, "fork_pages: dst_slots has shape [3], expected [batch=2]"),
        ({"src_slots": torch.zeros(513, dtype=INT)}, "fork_pages: batch is 513, expected 0 to 512"),
        ({"prefix_lens": torch.zeros(2, dtype=INT)}, "fork_pages: prefix_lens has shape [2], expected [num_slots=3]"),
        ({"status": torch.zeros(1, dtype=INT)}, "fork_pages: status has shape [1], expected [num_slots=3]"),
        ({"out": torch.zeros(3, dtype=INT)}, "fork_pages: out has shape [3], expected [batch=2]"),
    ],
)
def test_fork_pages_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    pool = sd.make_page_pool(4, 3, 3, 1, torch.empty(0))
    rows = torch.zeros(2, dtype=INT)
    arguments = {"src_slots": rows, "dst_slots": rows, "prefix_lens": torch.zeros(3, dtype=INT)} | change
    with pytest.raises(ValueError) as error:
        sd.fork_pages(pool, **arguments)
    assert str(error.value) == message
