"""write_kv against its reference, on pools full of NaN: elements that must not be written are compared, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import kv as reference
from support.paged import INT, assert_same_bytes, page_table, poisoned

STALLED, BAD_PAGE, BAD_LENGTH, SHARED_PAGE = (
    int(sd.Status[name]) for name in ("STALLED", "BAD_PAGE", "BAD_LENGTH", "SHARED_PAGE")
)


NAN = float("nan")
FP8 = torch.float8_e4m3fn


def ints(values: Any, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


def check(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, **arguments: Any) -> None:
    """Run the op on arguments["device"] over pools of the same strides, and compare with the reference on the host."""
    device = arguments.pop("device")
    on_device = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    got = [pool.to(device, copy=True) for pool in (k_pool, v_pool)]
    sd.write_kv(k.to(device), v.to(device), *got, **on_device)
    reference.write_kv(k, v, k_pool, v_pool, **arguments)
    assert_same_bytes(got[0], k_pool)
    assert_same_bytes(got[1], v_pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 128), (3, 64), (2, 5)])
def test_write_kv_of_padded_rows_matches_reference(
    device: torch.device, dtype: torch.dtype, page_size: int, heads: int, head_dim: int
) -> None:
    batch, q_len, num_slots = 5, 7, 6
    table, num_pages = page_table(num_slots, -(-40 // page_size))
    k, v = torch.randn(2, batch, q_len, heads, head_dim).to(dtype)
    check(
        k,
        v,
        poisoned(num_pages, page_size, heads, head_dim, dtype=dtype),
        poisoned(num_pages, page_size, heads, head_dim, dtype=dtype),
        page_table=table,
        prefix_lens=torch.randint(0, 30, (num_slots,), dtype=INT),
        row_offset=1,
        slots=ints([3, -1, 5, 0, 6], torch.device("cpu")),
        num_valid=ints([7, 7, 0, 3, 7], torch.device("cpu")),
        device=device,
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 5])
def test_write_kv_to_fp8_pools_matches_reference(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    table, num_pages = page_table(3, 4)
    values = torch.randn(2, 2, 7, 3, head_dim) * 10.0 ** torch.randint(-4, 4, (2, 2, 7, 3, head_dim))
    special = torch.tensor([NAN, float("inf"), -float("inf"), 0.0, -0.0, 448.0, 464.0, 465.0, 1e9, 2**-10, 3 * 2**-10])
    values.view(-1)[: len(special)] = special
    k, v = values.to(dtype)
    pools = [poisoned(num_pages, 4, 3, head_dim, dtype=FP8) for _ in range(2)]
    scales = {} if dtype == FP8 else {"k_scale": 0.37, "v_scale": 2.0}
    prefix_lens = torch.tensor([0, 5, 8], dtype=INT)
    check(k, v, *pools, page_table=table, prefix_lens=prefix_lens, slots=ints([2, 0], "cpu"), device=device, **scales)
    check(k, v, *pools, page_table=table, prefix_lens=prefix_lens, slots=ints([2, 0], "cpu"), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write_kv_rounds_to_nearest_even_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Cover every 16-bit float."""
    every = (
        torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16 if dtype == torch.float32 else dtype)
    )
    k = every.to(dtype).view(64, 1, 1024)[None]
    table = torch.tensor([[0]], dtype=INT)
    pools = [poisoned(1, 64, 1, 1024, dtype=FP8) for _ in range(2)]
    check(k, k, *pools, page_table=table, prefix_lens=torch.zeros(1, dtype=INT), device=device, v_scale=0.3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_write_kv_of_packed_rows_matches_reference(device: torch.device, page_size: int) -> None:
    ends = ints([0, 1, 1, 38, 60], torch.device("cpu"))  # the last row belongs to no request
    table, num_pages = page_table(4, -(-60 // page_size))
    k, v = torch.randn(2, 61, 3, 64).to(torch.bfloat16)
    pools = [poisoned(num_pages, page_size, 3, 64, dtype=torch.bfloat16) for _ in range(2)]
    prefix_lens = ints([3, 0, 17, 29], torch.device("cpu"))
    check(k, v, *pools, page_table=table, prefix_lens=prefix_lens, cu_seqlens_q=ends, device=device)


@pytest.mark.sanitize
def test_write_kv_matches_reference_on_small_inputs(device: torch.device) -> None:
    table, num_pages = page_table(2, 3)
    k, v = torch.randn(2, 2, 3, 1, 4)
    pools = [poisoned(num_pages, 2, 1, 4) for _ in range(2)]
    prefix_lens, num_valid = ints([2, 1], torch.device("cpu")), ints([3, 1], torch.device("cpu"))
    check(k, v, *pools, page_table=table, prefix_lens=prefix_lens, num_valid=num_valid, device=device)


def test_write_kv_of_more_rows_than_grid(device: torch.device) -> None:
    table, num_pages = page_table(600, 20)
    k, v = torch.randn(2, 600, 70, 1, 2)
    pools = [poisoned(num_pages, 4, 1, 2) for _ in range(2)]
    check(k, v, *pools, page_table=table, prefix_lens=torch.randint(0, 10, (600,), dtype=INT), device=device)


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_write_kv_of_strided_unaligned_tensors_matches_reference(device: torch.device, shift: int) -> None:
    """A layer of a pool of layers, heads before rows in k, v a slice of a fused projection."""
    table, num_pages = page_table(3, 4)
    table = table.to(device)
    fused = torch.randn(3, 5, 3, 3 * 8 + 8, device=device).to(torch.float16)
    k = torch.randn(3, 3, 5, 16, device=device).to(torch.float16).transpose(1, 2)[..., shift : shift + 8]
    v = fused[..., 16 + shift : 24 + shift]
    prefix_lens = ints([0, 5, 11], device)
    got = [poisoned(2, num_pages, 4, 3, 10, dtype=torch.float16).to(device)[1][..., 1:9] for _ in range(2)]
    sd.write_kv(k, v, *got, table, prefix_lens)
    want = [poisoned(num_pages, 4, 3, 8, dtype=torch.float16) for _ in range(2)]
    reference.write_kv(k.cpu(), v.cpu(), *want, table.cpu(), prefix_lens.cpu())
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)
        assert a._base is not None and a._base.isnan().sum() == a._base.numel() - (~b.isnan()).sum()


def refuse(device: torch.device, **changes: Any) -> tuple[list[int], list[int]]:
    """Return (status, rows written) of two requests of two rows, pages of two rows, with one argument changed."""
    k = torch.ones(2, 2, 1, 2, device=device)
    pools = [poisoned(4, 2, 1, 2).to(device) for _ in range(2)]
    arguments = {
        "page_table": ints([[0, 1], [2, 3]], device),
        "prefix_lens": ints([1, 1], device),
        "status": ints([0, 0], device),
    } | {name: x if isinstance(x, int) else ints(x, device) for name, x in changes.items()}
    if "cu_seqlens_q" in changes:
        k = k.view(4, 1, 2)
    sd.write_kv(k, k, *pools, **arguments)
    written = (~pools[0].isnan()).all(-1).flatten()
    assert torch.equal(written, (~pools[1].isnan()).all(-1).flatten())
    return arguments["status"].tolist(), written.nonzero().flatten().tolist()


WILD = [-1, 4, 2**31 - 1, -(2**31)]


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", WILD)
def test_write_kv_refuses_bad_data_row_by_row(device: torch.device, wild: int) -> None:
    other = [5, 6]  # the rows of slot 1, unaffected
    assert refuse(device) == ([0, 0], [1, 2, *other])
    assert refuse(device, page_table=[[0, wild], [2, 3]]) == ([BAD_PAGE, 0], [1, *other])
    assert refuse(device, page_table=[[wild, 1], [2, 3]]) == ([BAD_PAGE, 0], [2, *other])
    assert refuse(device, prefix_lens=[wild, 1]) == ([BAD_LENGTH, 0], other)
    assert refuse(device, num_valid=[wild, 2]) == ([BAD_LENGTH, 0], other)


@pytest.mark.sanitize
def test_write_kv_reports_status_of_refused_rows(device: torch.device) -> None:
    other = [5, 6]
    assert refuse(device, prefix_lens=[3, 1]) == ([BAD_LENGTH, 0], [3, *other]), "the second row is beyond the table"
    assert refuse(device, prefix_lens=[-1, 1], row_offset=1) == ([BAD_LENGTH, 0], [6, 7])
    assert refuse(device, row_offset=-2) == ([BAD_LENGTH, BAD_LENGTH], [0, 4])
    assert refuse(device, row_offset=2**31 - 1) == ([BAD_LENGTH, BAD_LENGTH], [])
    assert refuse(device, page_refs=[1, 2, 1, 1]) == ([SHARED_PAGE, 0], [1, *other])
    assert refuse(device, page_refs=[0, 1, 1, 1]) == ([0, 0], [1, 2, *other])
    assert refuse(device, status=[STALLED, BAD_PAGE]) == ([STALLED, BAD_PAGE], other)
    assert refuse(device, slots=[1, -1]) == ([0, 0], other)
    assert refuse(device, slots=[2, -(2**31)]) == ([0, 0], [])


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("ends", "want"),
    [
        ([0, 2, 4], ([0, 0], [1, 2, 5, 6])),
        ([1, 1, 2], ([0, 0], [5])),
        ([0, 2, 5], ([0, BAD_LENGTH], [1, 2])),
        ([-1, 2, 4], ([BAD_LENGTH, 0], [5, 6])),
        ([3, 2, 4], ([BAD_LENGTH, 0], [5, 6])),
        ([-(2**31), 2**31 - 1, 2], ([BAD_LENGTH, BAD_LENGTH], [])),
    ],
    ids=str,
)
def test_write_kv_of_invalid_packed_ends_stays_in_bounds(
    device: torch.device, ends: list[int], want: tuple[list[int], list[int]]
) -> None:
    assert refuse(device, cu_seqlens_q=ends) == want


def test_write_kv_does_not_depend_on_request_order(device: torch.device) -> None:
    table, num_pages = page_table(5, 4)
    k = torch.randn(5, 3, 2, 8, device=device)
    order = torch.randperm(5)
    results = []
    for slots in (torch.arange(5), order):
        pool = poisoned(num_pages, 4, 2, 8).to(device)
        where = {"page_table": table.to(device), "prefix_lens": ints([0, 3, 9, 2, 13], device)}
        sd.write_kv(k[slots.to(device)], k[slots.to(device)], pool, pool.clone(), slots=slots.to(device, INT), **where)
        results.append(pool.cpu())
    assert_same_bytes(results[0], results[1])


def test_write_kv_accepts_empty_batch_and_no_rows(device: torch.device) -> None:
    table, pool = ints([[0]], device), poisoned(1, 2, 1, 4).to(device)
    none, one = torch.empty(0, 3, 1, 4, device=device), torch.empty(1, 0, 1, 4, device=device)
    sd.write_kv(none, none, pool, pool.clone(), table, ints([0], device))
    status = ints([0], device)
    sd.write_kv(one, one, pool, pool.clone(), table, ints([0], device), num_valid=ints([1], device), status=status)
    assert status.tolist() == [BAD_LENGTH]
    assert pool.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 3, 1, 4, dtype=INT)}, "write_kv: k is int32, expected float32 or float16 or bfloat16 or float8_e4m3fn"),
        ({"v": torch.zeros(2, 3, 1, 4).half()}, "write_kv: v is float16, expected float32"),
        ({"v": torch.zeros(2, 2, 1, 4)}, "write_kv: v has shape [2, 2, 1, 4], expected [batch=2, q_len=3, heads=1, head_dim=4]"),
        ({"v_pool": torch.zeros(5, 2, 1, 4).bfloat16()}, "write_kv: v_pool is bfloat16, expected float32"),
        ({"k_pool": torch.zeros(5, 2, 1, 8)[..., ::2]}, "write_kv: k_pool has shape [5, 2, 1, 4] and is not contiguous in its last dimension, expected a last stride of 1"),
        ({"v_pool": torch.zeros(6, 2, 1, 4)}, "write_kv: v_pool has shape [6, 2, 1, 4], expected [num_pages=5, page_size=2, heads=1, head_dim=4]"),
        ({"prefix_lens": torch.zeros(3, dtype=INT)}, "write_kv: prefix_lens has shape [3], expected [num_slots=2]"),
        ({"row_offset": 2**31}, "write_kv: row_offset is 2147483648, expected -2147483647 to 2147483647"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=INT)}, "write_kv: k has shape [2, 3, 1, 4], expected [tokens, heads, head_dim]"),
        ({"num_valid": torch.zeros(3, dtype=INT)}, "write_kv: num_valid has shape [3], expected [batch=2]"),
        ({"k_pool": torch.zeros(5, 2, 1, 4).bfloat16()}, "write_kv: k_pool is bfloat16, expected float32 or float8_e4m3fn"),
        ({"k_pool": torch.zeros(5, 2, 1, 4).to(FP8), "v_pool": torch.zeros(5, 2, 1, 4).to(FP8), "k_scale": 0.0}, "write_kv: k_scale is 0.000000, expected a finite float32 above 0"),
        ({"v_scale": 2.0}, "write_kv: v_scale is 2.000000, expected 1 for pools of float32"),
        ({"page_refs": torch.zeros(4, dtype=INT)}, "write_kv: page_refs has shape [4], expected [num_pages=5]"),
    ],
)  # fmt: skip
def test_write_kv_error_messages(change: dict[str, object], message: str) -> None:
    k, pool, lens = torch.zeros(2, 3, 1, 4), torch.zeros(5, 2, 1, 4), torch.zeros(2, dtype=INT)
    table = torch.zeros(2, 4, dtype=INT)
    arguments = {"k": k, "v": k, "k_pool": pool, "v_pool": pool, "page_table": table, "prefix_lens": lens} | change
    with pytest.raises(ValueError) as error:
        sd.write_kv(**arguments)
    assert str(error.value) == message
