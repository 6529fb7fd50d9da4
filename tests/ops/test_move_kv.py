"""move_kv against its reference: overlapping moves, page boundaries, every layer, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference
from support.paged import INT, assert_same_bytes, page_table, poisoned

STALLED, BAD_TREE, BAD_PAGE, BAD_LENGTH, SHARED_PAGE = (
    int(sd.Status[name]) for name in ("STALLED", "BAD_TREE", "BAD_PAGE", "BAD_LENGTH", "SHARED_PAGE")
)
HOST = torch.device("cpu")


def ints(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


def random_paths(batch: int, width: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rising paths from the root through trees of `nodes` nodes, then garbage, and the paths' valid lengths."""
    path = torch.full((batch, width), 2**31 - 1, dtype=INT)
    num_valid = torch.randint(0, width + 1, (batch,), dtype=INT)
    for b in range(batch):
        count = int(num_valid[b])
        nodes_but_root = 1 + torch.randperm(nodes - 1)[: max(count - 1, 0)].sort().values
        path[b, :count] = torch.cat([torch.zeros(min(count, 1), dtype=INT), nodes_but_root.to(INT)])
    return path, num_valid


def check(device: torch.device, pools: list[torch.Tensor], **arguments: torch.Tensor) -> None:
    got = [pool.to(device, copy=True) for pool in pools]
    status = torch.zeros(len(arguments["prefix_lens"]), dtype=INT, device=device)
    sd.move_kv(*got, **{name: x.to(device) for name, x in arguments.items()}, status=status)
    reference.move_kv(*pools, **arguments)
    assert_same_bytes(got[0], pools[0])
    assert_same_bytes(got[1], pools[1])
    assert (status == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(1, 1, 128), (3, 3, 64), (2, 3, 5)])
def test_move_kv_matches_reference(
    device: torch.device, dtype: torch.dtype, page_size: int, layers: int, heads: int, head_dim: int
) -> None:
    table, num_pages = page_table(6, -(-40 // page_size))
    path, num_valid = random_paths(7, 8, 16)
    check(
        device,
        [torch.randn(layers, num_pages, page_size, heads, head_dim).to(dtype) for _ in range(2)],
        page_table=table,
        path=path,
        num_valid=num_valid,
        prefix_lens=torch.randint(0, 24, (6,), dtype=INT),
        slots=ints([4, 1, -1, 5, 0, 6, 3], HOST),
    )


@pytest.mark.sanitize
def test_move_kv_matches_reference_on_small_inputs(device: torch.device) -> None:
    table, num_pages = page_table(2, 3)
    path, seq_lens = ints([[0, 1, 3], [0, 2, 3]], HOST), ints([1, 2], HOST)
    pools = [torch.randn(2, num_pages, 2, 1, 4) for _ in range(2)]
    num_valid = ints([3, 3], HOST)
    check(device, pools, page_table=table, path=path, num_valid=num_valid, prefix_lens=seq_lens)


def test_move_kv_of_wide_rows_matches_reference(device: torch.device) -> None:
    """A row has more columns than one block has threads."""
    table, num_pages = page_table(2, 20)
    path, num_valid = random_paths(2, 6, 9)
    pools = [torch.randn(1, num_pages, 1, 12, 128) for _ in range(2)]
    check(device, pools, page_table=table, path=path, num_valid=num_valid, prefix_lens=ints([0, 9], HOST))


def test_move_kv_moves_each_row_before_overwriting_it(device: torch.device) -> None:
    """Path 0 2 3 4: every destination but the first is the source of the previous move."""
    pool = torch.arange(8.0, device=device).view(1, 4, 2, 1, 1)
    where = (ints([[2, 0, 3, 1]], device), ints([[0, 2, 3, 4]], device), ints([4], device), ints([1], device))
    sd.move_kv(pool, pool.clone(), *where)
    # The slot's rows 0.. held 4 5 | 0 1 | 6 7 | 2 3; rows 3, 4, 5 went to 2, 3, 4.
    assert pool.view(4, 2).tolist() == [[1.0, 6.0], [2.0, 3.0], [4.0, 5.0], [7.0, 7.0]]


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_move_kv_of_strided_unaligned_pools_matches_reference(device: torch.device, shift: int) -> None:
    """K and V share one allocation; layers are the innermost of the outer dimensions."""
    table, num_pages = page_table(2, 4)
    both = torch.randn(num_pages, 4, 3, 2, 2, 16, device=device).to(torch.bfloat16).permute(3, 4, 0, 1, 2, 5)
    path, num_valid = random_paths(2, 5, 8)
    seq_lens = ints([1, 7], HOST)
    want = both.cpu().clone()
    inner = (..., slice(shift, shift + 8))
    on_device = [x.to(device) for x in (table, path, num_valid, seq_lens)]
    sd.move_kv(both[0][inner], both[1][inner], *on_device)
    reference.move_kv(want[0][inner], want[1][inner], table, path, num_valid, seq_lens)
    assert_same_bytes(both, want)


@pytest.mark.parametrize("page_size", [1, 16])
def test_move_kv_stops_long_paths_at_first_bad_entry(device: torch.device, page_size: int) -> None:
    """Paths have more entries than a warp has lanes; one entry does not rise or lies outside the table."""
    batch, width, nodes = 12, 90, 120
    table, num_pages = page_table(batch, -(-160 // page_size))
    path, num_valid = random_paths(batch, width, nodes)
    num_valid[:4] = width
    path[:4] = torch.stack([torch.randperm(nodes)[:width].sort().values for _ in range(4)]).to(INT)
    path[:4, 0] = 0
    path[0, 2:] = torch.arange(width - 2) + 3  # in place up to the second entry
    status = torch.zeros(batch, dtype=INT)
    good = num_valid.clone()
    for b in range(1, batch):
        if good[b] > 1:
            at = int(torch.randint(1, int(good[b]), ()))
            path[b, at], status[b] = (path[b, at - 1], BAD_TREE) if b % 2 else (2**31 - 1, BAD_LENGTH)
            good[b] = at
    seq_lens = torch.randint(0, 30, (batch,), dtype=INT)
    pools = [torch.randn(2, num_pages, page_size, 1, 8) for _ in range(2)]
    got, got_status = [pool.to(device, copy=True) for pool in pools], torch.zeros(batch, dtype=INT, device=device)
    where = [x.to(device) for x in (table, path, num_valid, seq_lens)]
    sd.move_kv(*got, *where, status=got_status)
    reference.move_kv(*pools, table, path, good, seq_lens)
    assert_same_bytes(got[0], pools[0])
    assert_same_bytes(got[1], pools[1])
    assert got_status.tolist() == status.tolist()


def test_move_kv_keeps_bits_of_nan(device: torch.device) -> None:
    pool = poisoned(1, 4, 1, 1, 1).to(device)
    pool[0, 1] = 5.0
    where = (ints([[0, 1, 2, 3]], device), ints([[0, 2]], device), ints([2], device), ints([0], device))
    sd.move_kv(pool, pool.clone(), *where)
    assert pool.isnan().all()


def refuse(device: torch.device, **changes: Any) -> tuple[list[int], list[list[float]]]:
    """Return (status, rows) of two slots of six rows (pages of two, path 0 2 4, row 1) with one argument changed."""
    pool = torch.arange(12.0, device=device).view(1, 6, 2, 1, 1).clone()
    v_pool = -pool
    arguments = {
        "page_table": ints([[0, 1, 2], [3, 4, 5]], device),
        "path": ints([[0, 2, 4]] * 2, device),
        "num_valid": ints([3, 3], device),
        "prefix_lens": ints([1, 1], device),
        "status": ints([0, 0], device),
    } | {name: ints(x, device) for name, x in changes.items()}
    sd.move_kv(pool, v_pool, **arguments)
    assert torch.equal(pool, -v_pool)
    return arguments["status"].tolist(), pool.view(2, 6).tolist()


UNTOUCHED = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
ONE_MOVE = [0.0, 1.0, 3.0, 3.0, 4.0, 5.0]
MOVED = [0.0, 1.0, 3.0, 5.0, 4.0, 5.0]
OTHER_MOVED = [x + 6 for x in MOVED]
WILD = [-1, 2**31 - 1, -(2**31)]


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", WILD)
def test_move_kv_ends_a_request_at_bad_data(device: torch.device, wild: int) -> None:
    too_far = BAD_LENGTH if wild > 0 else BAD_TREE
    assert refuse(device) == ([0, 0], [MOVED, OTHER_MOVED])
    assert refuse(device, path=[[wild, 2, 4], [0, 2, 4]]) == ([BAD_TREE, 0], [UNTOUCHED, OTHER_MOVED])
    assert refuse(device, path=[[0, wild, 4], [0, 2, 4]]) == ([too_far, 0], [UNTOUCHED, OTHER_MOVED])
    assert refuse(device, path=[[0, 2, wild], [0, 2, 4]]) == ([too_far, 0], [ONE_MOVE, OTHER_MOVED])
    assert refuse(device, num_valid=[wild, 3]) == ([BAD_LENGTH, 0], [UNTOUCHED, OTHER_MOVED])
    assert refuse(device, prefix_lens=[wild, 1]) == ([BAD_LENGTH, 0], [UNTOUCHED, OTHER_MOVED])
    assert refuse(device, page_table=[[0, wild, 2], [3, 4, 5]]) == ([BAD_PAGE, 0], [UNTOUCHED, OTHER_MOVED])
    assert refuse(device, page_table=[[0, 1, wild], [3, 4, 5]]) == ([BAD_PAGE, 0], [ONE_MOVE, OTHER_MOVED])


@pytest.mark.sanitize
def test_move_kv_reports_status_of_refused_slots(device: torch.device) -> None:
    def with_slot_0(status: int, rows: list[float]) -> tuple[list[int], list[list[float]]]:
        return [status, 0], [rows, OTHER_MOVED]

    assert refuse(device, num_valid=[4, 3]) == with_slot_0(BAD_LENGTH, UNTOUCHED)
    assert refuse(device, path=[[0, 2, 2], [0, 2, 4]]) == with_slot_0(BAD_TREE, ONE_MOVE)
    assert refuse(device, path=[[0, 4, 2], [0, 2, 4]]) == with_slot_0(BAD_TREE, [0.0, 1.0, 5.0, 3.0, 4.0, 5.0])
    assert refuse(device, path=[[0, 2, 5], [0, 2, 4]]) == with_slot_0(BAD_LENGTH, ONE_MOVE)
    assert refuse(device, page_refs=[1, 2, 1, 1, 1, 1]) == with_slot_0(SHARED_PAGE, UNTOUCHED)
    assert refuse(device, page_refs=[2, 1, 2, 1, 1, 1]) == with_slot_0(0, MOVED), "sources may be shared"
    assert refuse(device, status=[STALLED, 0]) == with_slot_0(STALLED, UNTOUCHED)
    assert refuse(device, slots=[2, 1]) == with_slot_0(0, UNTOUCHED)


@pytest.mark.parametrize("count", [0, 1])
def test_move_kv_of_empty_paths_moves_nothing(device: torch.device, count: int) -> None:
    assert refuse(device, num_valid=[count, 3]) == ([0, 0], [UNTOUCHED, OTHER_MOVED])


def test_move_kv_of_a_chain_writes_nothing(device: torch.device) -> None:
    shared = {"page_refs": [2] * 6, "page_table": [[-1] * 3, [3, 4, 5]]}  # nothing is written, so nothing is refused
    assert refuse(device, path=[[0, 1, 2]] * 2, **shared)[0] == [0, 0]


def test_move_kv_does_not_depend_on_request_order(device: torch.device) -> None:
    table, num_pages = page_table(5, 6)
    path, num_valid = (x.to(device) for x in random_paths(5, 6, 10))
    pools, where = torch.randn(2, num_pages, 4, 1, 8, device=device), (table.to(device), path, num_valid)
    seq_lens, order = ints([0, 3, 9, 2, 13], device), torch.randperm(5, device=device)
    straight, permuted = pools.clone(), pools.clone()
    sd.move_kv(straight, pools.clone(), *where, seq_lens)
    where = (table.to(device), path[order], num_valid[order])
    sd.move_kv(permuted, pools.clone(), *where, seq_lens, slots=order.to(INT))
    assert torch.equal(straight, permuted)


def test_move_kv_accepts_empty_batch_and_no_layers(device: torch.device) -> None:
    table, lens = ints([[0]], device), ints([0], device)
    pools, none = torch.zeros(2, 1, 2, 1, 4, device=device), torch.empty(0, 3, dtype=INT, device=device)
    sd.move_kv(pools, pools.clone(), table, none, none[:, 0].contiguous(), lens)
    sd.move_kv(pools[:0], pools[:0], table, ints([[0, 1]], device), ints([2], device), lens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pools": torch.zeros(3, 5, 2, 1, 4, dtype=INT)}, "move_kv: k_pools is int32, expected float32 or float16 or bfloat16 or float8_e4m3fn"),
        ({"v_pools": torch.zeros(3, 5, 2, 1, 4).half()}, "move_kv: v_pools is float16, expected float32"),
        ({"v_pools": torch.zeros(2, 5, 2, 1, 4)}, "move_kv: v_pools has shape [2, 5, 2, 1, 4], expected [layers=3, num_pages=5, page_size=2, heads=1, head_dim=4]"),
        ({"k_pools": torch.zeros(3, 5, 2, 1, 8)[..., ::2]}, "move_kv: k_pools has shape [3, 5, 2, 1, 4] and is not contiguous in its last dimension, expected a last stride of 1"),
        ({"path": torch.zeros(2, 6, dtype=INT)[:, ::2]}, "move_kv: path has shape [2, 3] and is not contiguous, expected a contiguous tensor"),
        ({"num_valid": torch.zeros(3, dtype=INT)}, "move_kv: num_valid has shape [3], expected [batch=2]"),
        ({"prefix_lens": torch.zeros(1, dtype=INT)}, "move_kv: prefix_lens has shape [1], expected [num_slots=2]"),
        ({"slots": torch.zeros(2)}, "move_kv: slots is float32, expected int32"),
    ],
)  # fmt: skip
def test_move_kv_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    pools, lens, table = torch.zeros(3, 5, 2, 1, 4), torch.zeros(2, dtype=INT), torch.zeros(2, 4, dtype=INT)
    arguments = {
        "k_pools": pools,
        "v_pools": pools,
        "page_table": table,
        "path": torch.zeros(2, 3, dtype=INT),
        "num_valid": lens,
        "prefix_lens": lens,
    } | change
    with pytest.raises(ValueError) as error:
        sd.move_kv(**arguments)
    assert str(error.value) == message
