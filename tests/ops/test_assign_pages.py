"""assign_pages: each rule in a worked example. Random sequences of calls are in test_page_sequences.py."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from support.page_pools import TwoPools
from support.paged import INT


@pytest.mark.sanitize
def test_assign_pages_moves_pages_to_another_slot(device: torch.device) -> None:
    """Slot 2, which no request uses, retains the pages; slot 1 borrows them; finally they are released."""
    pools = TwoPools(device, 6, 3, 4, 2)
    pools.alloc([7, 0, 0], 0, [0])
    pools.assign([0, 1, 2], [8, 9, 10])
    assert pools.pool.page_refs.tolist() == [2, 2, 2, 1, 0, 0]
    pools.free([0, 0, 0], [0])
    assert pools.pool.page_refs.tolist() == [1, 1, 1, 0, 0, 0] and pools.num_free() == 3
    pools.assign([8, 9], [4, 5])
    assert pools.model.page_table.tolist() == [[-1] * 4, [0, 1, -1, -1], [0, 1, 2, -1]]
    pools.assign([-1, -1, -1], [10, 9, 8])
    assert pools.num_free() == 4 and pools.model.free_stack[:4].tolist()[-1] == 2
    assert pools.pool.page_refs.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.sanitize
def test_assign_pages_never_pushes_a_page_that_moves(device: torch.device) -> None:
    """Its last owner releases it in the call that gives it to another; the stack is unchanged."""
    pools = TwoPools(device, 4, 2, 2, 1)
    pools.alloc([2, 1])
    pools.assign([2, -1], [0, 1])
    assert pools.model.page_table.tolist() == [[2, -1], [2, -1]]
    assert pools.pool.page_refs.tolist() == [0, 0, 2, 0] and pools.num_free() == 3
    assert pools.model.free_stack[:3].tolist() == [3, 0, 1], "in the order of the rows"


def test_assign_pages_frees_a_page_at_its_last_release(device: torch.device) -> None:
    pools = TwoPools(device, 4, 3, 2, 1)
    pools.alloc([2, 0, 0])
    pools.assign([0, 0, 1], [2, 4, 5])
    pools.assign([-1] * 5, [4, 1, 0, 5, 2])
    assert pools.model.free_stack[:4].tolist() == [3, 2, 1, 0] and pools.num_free() == 4


@pytest.mark.sanitize
def test_assign_pages_skips_empty_rows_and_invalid_pages(device: torch.device) -> None:
    pools = TwoPools(device, 4, 2, 3, 1)
    pools.alloc([3, 0])
    for index, wild in ((1, 9), (2, 3)):  # 3 has no owner
        pools.set_entry(0, index, wild)
    pools.assign([0, 1, 2, 0, 0, 0, 6, -7], [3, 4, 5, -1, 6, 3, 1, 2])
    assert pools.model.page_table.tolist() == [[0, -1, -1], [0, -1, -1]]
    assert pools.pool.page_refs.tolist() == [2, 1, 1, 0], "what was lost before stays lost"


def test_assign_pages_accepts_largest_row_count(device: torch.device) -> None:
    pools = TwoPools(device, 2000, 4, 600, 1)
    pools.alloc([600, 600, 0, 0])
    entries = torch.randperm(600)[:512]
    pools.assign(entries.tolist(), (1200 + torch.randperm(600)[:512]).tolist())
    pools.assign(entries.tolist(), (600 + torch.randperm(600)[:512]).tolist())
    pools.assign([-1] * 512, (1200 + torch.randperm(600)[:512]).tolist())
    owners = torch.bincount(pools.model.page_table[pools.model.page_table >= 0], minlength=2000)
    assert torch.equal(owners.int(), pools.model.page_refs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_entries": torch.zeros(2)}, "assign_pages: src_entries is float32, expected int32"),
        ({"dst_entries": torch.zeros(3, dtype=INT)}, "assign_pages: dst_entries has shape [3], expected [batch=2]"),
        ({"src_entries": torch.zeros(513, dtype=INT)}, "assign_pages: batch is 513, expected 0 to 512"),
    ],
)
def test_assign_pages_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    pool = sd.make_page_pool(4, 3, 3, 1, torch.empty(0))
    rows = torch.zeros(2, dtype=INT)
    with pytest.raises(ValueError) as error:
        sd.assign_pages(pool, **{"src_entries": rows, "dst_entries": rows} | change)
    assert str(error.value) == message
