"""copy_kv against its reference, alone and after fork_pages: every layer, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference
from support.paged import INT, assert_same_bytes, page_table

STALLED, BAD_PAGE, BAD_LENGTH, SHARED_PAGE = (
    int(sd.Status[name]) for name in ("STALLED", "BAD_PAGE", "BAD_LENGTH", "SHARED_PAGE")
)


def ints(values: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


def check(device: torch.device, pools: list[torch.Tensor], *arguments: torch.Tensor) -> None:
    got = [pool.to(device, copy=True) for pool in pools]
    on_device = [x.to(device) for x in arguments]
    status = torch.zeros(len(arguments[0]), dtype=INT, device=device)
    sd.copy_kv(*got, *on_device, status=status)
    reference.copy_kv(*pools, *arguments)
    assert_same_bytes(got[0], pools[0])
    assert_same_bytes(got[1], pools[1])
    assert (status == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(1, 1, 128), (3, 3, 64), (2, 3, 5), (2, 12, 128)])
def test_copy_kv_matches_reference(
    device: torch.device, dtype: torch.dtype, page_size: int, layers: int, heads: int, head_dim: int
) -> None:
    """Includes more rows than a warp has lanes, page boundaries, and empty rows at either end."""
    table, num_pages = page_table(6, -(-70 // page_size))
    check(
        device,
        [torch.randn(layers, num_pages, page_size, heads, head_dim).to(dtype) for _ in range(2)],
        table,
        ints([0, 0, -1, 1, 6, 1]),
        ints([2, 3, 4, 7, 5, 5]),
        ints([9, 9, 70, 5, 9, 40]),
        ints([70, 3, 4, 2, 1, 0]),
    )


@pytest.mark.sanitize
def test_copy_kv_matches_reference_on_small_inputs(device: torch.device) -> None:
    table, num_pages = page_table(3, 2)
    pools = [torch.randn(2, num_pages, 2, 1, 4) for _ in range(2)]
    check(device, pools, table, ints([0, 0]), ints([2, 1]), ints([0, 3, 4]), ints([2, 1]))


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_copy_kv_after_fork_pages_gives_forks_the_source_rows(device: torch.device, page_size: int) -> None:
    """Three samples of one prompt read the same rows and write rows of their own."""
    pool = sd.make_page_pool(70, 4, 50, page_size, torch.empty(0, device=device))
    prompt, status = 33, ints([0] * 4, device)
    lens = ints([prompt] * 4, device)
    sd.alloc_pages(pool, lens, 7, slots=ints([2], device))
    k_pools, v_pools = torch.randn(2, 2, 70, page_size, 1, 8, device=device)
    source, targets = ints([2] * 3, device), ints([0, 3, 1], device)
    num_rows = sd.fork_pages(pool, source, targets, lens, status=status)
    sd.copy_kv(
        k_pools, v_pools, pool.page_table, source, targets, lens, num_rows, page_refs=pool.page_refs, status=status
    )

    def rows(slot: int, count: int) -> torch.Tensor:
        places = [reference.row_address(pool.page_table, slot, row, page_size) for row in range(count)]
        return torch.stack([torch.stack([pools[:, page, row] for page, row in places]) for pools in (k_pools, v_pools)])

    before = rows(2, prompt)
    sd.alloc_pages(pool, lens, 7, status=status)
    new = torch.arange(4.0, device=device).view(4, 1, 1, 1).expand(4, 7, 1, 8).contiguous()
    for layer in range(2):
        sd.write_kv(
            new, -new, k_pools[layer], v_pools[layer], pool.page_table, lens, page_refs=pool.page_refs, status=status
        )
    assert status.tolist() == [0] * 4
    for slot in range(4):
        assert torch.equal(rows(slot, prompt), before)
        assert (rows(slot, prompt + 7)[0, prompt:] == slot).all()


def refuse(device: torch.device, **changes: Any) -> tuple[list[int], list[list[float]]]:
    """Return (status, rows) after copying rows 1..3 of slot 0 to slots 1 and 2 with one argument changed."""
    pool = torch.arange(12.0, device=device).view(1, 6, 2, 1, 1).clone()
    v_pool = -pool
    arguments = {
        "page_table": ints([[0, 1], [2, 3], [4, 5]], device),
        "src_slots": ints([0, 0], device),
        "dst_slots": ints([1, 2], device),
        "prefix_lens": ints([0, 4, 4], device),
        "num_rows": ints([3, 3], device),
        "status": ints([0, 0, 0], device),
    } | {name: ints(x, device) for name, x in changes.items()}
    sd.copy_kv(pool, v_pool, **arguments)
    assert torch.equal(pool, -v_pool)
    return arguments["status"].tolist(), pool.view(3, 4).tolist()[1:]


COPIED, UNTOUCHED, OTHER = [4.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 1.0, 2.0, 3.0]


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", [-1, 6, 2**31 - 1, -(2**31)])
def test_copy_kv_refuses_bad_data(device: torch.device, wild: int) -> None:
    def with_slot_1(status: int, rows: list[float]) -> tuple[list[int], list[list[float]]]:
        return [0, status, 0], [rows, OTHER]

    assert refuse(device) == with_slot_1(0, COPIED)
    assert refuse(device, num_rows=[wild, 3]) == with_slot_1(BAD_LENGTH, UNTOUCHED)
    assert refuse(device, prefix_lens=[0, wild, 4]) == with_slot_1(BAD_LENGTH, UNTOUCHED)
    assert refuse(device, src_slots=[wild, 0]) == with_slot_1(0, UNTOUCHED)
    assert refuse(device, dst_slots=[wild, 2]) == with_slot_1(0, UNTOUCHED)
    bad = refuse(device, page_table=[[0, 1], [2, wild], [4, 5]])
    assert bad == with_slot_1(BAD_PAGE, [4.0, 1.0, 6.0, 7.0]), "row by row"
    bad = refuse(device, page_table=[[wild, 1], [2, 3], [4, 5]])
    assert bad == ([0, BAD_PAGE, BAD_PAGE], [[4.0, 5.0, 2.0, 3.0], [8.0, 9.0, 2.0, 3.0]])


@pytest.mark.sanitize
def test_copy_kv_reports_status_of_refused_slots(device: torch.device) -> None:
    assert refuse(device, status=[0, STALLED, 0]) == ([0, STALLED, 0], [UNTOUCHED, OTHER])
    assert refuse(device, status=[STALLED, 0, 0]) == ([STALLED, 0, 0], [COPIED, OTHER]), "a source is only read"
    assert refuse(device, prefix_lens=[0, 5, 4]) == ([0, BAD_LENGTH, 0], [UNTOUCHED, OTHER])
    shared = refuse(device, page_refs=[2, 2, 1, 2, 1, 1])
    assert shared == ([0, SHARED_PAGE, 0], [[4.0, 1.0, 6.0, 7.0], OTHER])


def test_copy_kv_accepts_empty_batch_and_no_layers(device: torch.device) -> None:
    table, one, none = ints([[0]], device), ints([0], device), ints([], device)
    pools = torch.zeros(2, 1, 2, 1, 4, device=device)
    sd.copy_kv(pools, pools.clone(), table, none, none, one, none)
    sd.copy_kv(pools[:0], pools[:0], table, one, one, one, one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pools": torch.zeros(3, 5, 2, 1, 4, dtype=INT)}, "copy_kv: k_pools is int32, expected float32 or float16 or bfloat16 or float8_e4m3fn"),
        ({"v_pools": torch.zeros(2, 5, 2, 1, 4)}, "copy_kv: v_pools has shape [2, 5, 2, 1, 4], expected [layers=3, num_pages=5, page_size=2, heads=1, head_dim=4]"),
        ({"page_table": torch.zeros(2, 4)}, "copy_kv: page_table is float32, expected int32"),
        ({"dst_slots": torch.zeros(3, dtype=INT)}, "copy_kv: dst_slots has shape [3], expected [batch=2]"),
        ({"prefix_lens": torch.zeros(3, dtype=INT)}, "copy_kv: prefix_lens has shape [3], expected [num_slots=2]"),
        ({"num_rows": torch.zeros(3, dtype=INT)}, "copy_kv: num_rows has shape [3], expected [batch=2]"),
        ({"page_refs": torch.zeros(4, dtype=INT)}, "copy_kv: page_refs has shape [4], expected [num_pages=5]"),
    ],
)  # fmt: skip
def test_copy_kv_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    pools, rows = torch.zeros(3, 5, 2, 1, 4), torch.zeros(2, dtype=INT)
    arguments = {
        "k_pools": pools,
        "v_pools": pools,
        "page_table": torch.zeros(2, 4, dtype=INT),
        "src_slots": rows,
        "dst_slots": rows,
        "prefix_lens": rows,
        "num_rows": rows,
    } | change
    with pytest.raises(ValueError) as error:
        sd.copy_kv(**arguments)
    assert str(error.value) == message
