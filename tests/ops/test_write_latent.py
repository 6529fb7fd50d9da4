"""write_latent and rope_heads against their references: rows of latent attention's cache, and rotated query heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels import Status
from specdec_kernels.reference import mla as reference
from support.devices import TOLERANCES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGE_SIZE, NUM_PAGES, SLOTS, MAX_PAGES = 4, 12, 3, 4


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(got: Tensor, want: Tensor) -> None:
    """Check an error of a few roundings against the float64 result, relative to its scale."""
    error = float((got.double().cpu() - want.double()).abs().max())
    assert error <= TOLERANCES[got.dtype] * max(1.0, float(want.abs().max())), error


def case(latent: int, rope: int, dtype: torch.dtype, packed: bool, width: int = 0) -> dict[str, Any]:
    """Return arguments for three requests; rows of x and q are parts of wider ones."""
    rows = (11,) if packed else (3, 5)
    wide = torch.randn(*rows, width + latent + rope + 3).to(dtype)
    arguments: dict[str, Any] = {
        "x": wide[..., width : width + latent + rope],
        "norm": (torch.rand(latent) + 0.5).to(dtype),
        "kv_pool": torch.randn(NUM_PAGES, PAGE_SIZE, latent + rope).to(dtype),
        "page_table": torch.randperm(NUM_PAGES).int().view(SLOTS, MAX_PAGES),
        "prefix_lens": int32([2, 0, 7]),
        "slots": int32([2, -1, 0]),
        "row_offset": 1,
    }
    if packed:
        arguments["cu_seqlens_q"] = int32([0, 4, 5, 9])  # two rows of no request
    else:
        arguments["num_valid"] = int32([5, 3, 2])
    if rope:
        arguments |= {"cos_sin": torch.rand(20, rope), "positions": torch.randint(-3, 25, rows, dtype=torch.int32)}
    if width:
        arguments |= {"q": wide[..., :width], "q_norm": (torch.rand(width) + 0.5).to(dtype)}
        arguments["q_out"] = torch.full((*rows, width), torch.nan, dtype=dtype)
    return arguments


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return copies on a device, with the strides of the originals."""

    def moved(tensor: Tensor) -> Tensor:
        whole = tensor if tensor.is_contiguous() or tensor._base is None else tensor._base
        copied = whole.clone().to(device)
        return copied if whole is tensor else copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {key: moved(value) if isinstance(value, Tensor) else value for key, value in arguments.items()}


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("latent", "rope", "width"), [(512, 64, 1536), (512, 64, 0), (256, 32, 768), (48, 16, 40), (7, 6, 5), (32, 0, 4096)]
)
def test_rows_and_queries_are_those_of_the_reference(
    latent: int, rope: int, width: int, packed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    arguments = case(latent, rope, dtype, packed, width)
    for interleaved in (False, True):
        got, want = on(device, arguments), on(torch.device("cpu"), arguments)
        sd.write_latent(**got, interleaved=interleaved)
        reference.write_latent(**want, interleaved=interleaved)
        check(got["kv_pool"], want["kv_pool"].double())
        assert torch.equal(
            got["kv_pool"].cpu() == arguments["kv_pool"], want["kv_pool"] == arguments["kv_pool"]
        )  # the same rows are written
        if width:
            check(got["q_out"], want["q_out"].double())


@pytest.mark.sanitize
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_8_bits_are_quantized_by_the_scale(packed: bool, device: torch.device) -> None:
    arguments = case(512, 64, torch.float32, packed)
    arguments["kv_pool"] = arguments["kv_pool"].to(torch.float8_e4m3fn)
    got, want = on(device, arguments), on(torch.device("cpu"), arguments)
    sd.write_latent(**got, kv_scale=0.25)
    reference.write_latent(**want, kv_scale=0.25)
    ours, theirs = got["kv_pool"].cpu().float(), want["kv_pool"].float()
    assert (ours != theirs).float().mean() < 1e-3  # rounding in float32 may cross a border of 8 bits
    torch.testing.assert_close(ours, theirs, rtol=0.13, atol=0.01)


def test_rows_without_a_page_of_their_own_are_skipped(device: torch.device) -> None:
    arguments = on(device, case(32, 16, torch.float32, False))
    arguments["page_table"][2, 2] = NUM_PAGES  # rows 8 to 11 of slot 2
    refs = torch.ones(NUM_PAGES, dtype=torch.int32, device=device)
    refs[arguments["page_table"][0, 0]] = 2  # rows 0 to 3 of slot 0
    status = torch.zeros(SLOTS, dtype=torch.int32, device=device)
    before = arguments["kv_pool"].clone()
    sd.write_latent(**arguments, page_refs=refs, status=status)
    assert status.tolist() == [Status.SHARED_PAGE, 0, Status.BAD_PAGE]
    changed = (arguments["kv_pool"] != before).any(-1)
    # Slot 2 writes rows 8 to 12, the last one in its last page; slot 0 rows 3 and 4.
    rows = {(int(arguments["page_table"][2, 3]), 0), (int(arguments["page_table"][0, 1]), 0)}
    assert {(int(page), int(row)) for page, row in changed.nonzero()} == rows
    status.fill_(Status.STALLED)
    arguments["kv_pool"].copy_(before)
    sd.write_latent(**arguments, status=status)
    assert torch.equal(arguments["kv_pool"], before)


@pytest.mark.parametrize(
    ("bounds", "written", "bits"),
    [
        ([0, 6], 6, 0),
        ([1, 4], 3, 0),
        ([2, 2], 0, 0),
        ([-1, 3], 0, 0),
        ([4, 3], 0, 0),
        ([4, 7], 0, Status.BAD_LENGTH),  # there are 6 rows
    ],
    ids=str,
)
def test_rows_of_one_packed_request_are_its_own(
    bounds: list[int], written: int, bits: int, device: torch.device
) -> None:
    x, slots = torch.randn(6, 48, device=device), int32([1]).to(device)
    pool = torch.full((4, 4, 48), torch.nan, device=device)
    table, prefix = int32([[-1, -1], [3, 1]]).to(device), int32([9, 1]).to(device)
    status = int32([0, 0]).to(device)
    sd.write_latent(
        x, torch.ones(32, device=device), pool, table, prefix,
        slots=slots, cu_seqlens_q=int32(bounds).to(device), status=status,
    )  # fmt: skip
    assert status.tolist() == [0, bits]
    rows = torch.cat([pool[3], pool[1]])  # of slot 1
    assert torch.equal(rows[1 : 1 + written, 32:], x[bounds[0] : bounds[0] + written, 32:])
    rows[1 : 1 + written] = torch.nan
    assert rows.isnan().all() and pool[[0, 2]].isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "rope"), [(1, 1, 2), (5, 16, 64), (300, 20, 64), (3, 7, 6), (0, 4, 16)])
def test_rotated_heads_are_those_of_the_reference(
    rows: int, heads: int, rope: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(rows, heads, rope + 5).to(dtype)[..., 3 : 3 + rope]
    cos_sin, positions = torch.rand(20, rope), torch.randint(-3, 25, (rows,), dtype=torch.int32)
    for interleaved in (False, True):
        whole = torch.full((rows, heads, rope + 8), torch.nan, dtype=dtype, device=device)
        moved = torch.randn(rows, heads, rope + 5).to(dtype).to(device)[..., 3 : 3 + rope].copy_(x)
        out = sd.rope_heads(
            moved, cos_sin.to(device), positions.to(device), interleaved=interleaved, out=whole[..., 8:]
        )
        assert whole[..., :8].isnan().all()
        if rows:
            check(out, reference.rope_heads(x, cos_sin, positions, interleaved=interleaved))


X, NORM, POOL = torch.zeros(2, 3, 24), torch.zeros(16), torch.zeros(4, 2, 24)
TABLE, LENS, TURN = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 24)}, "x has shape [2, 24], expected [batch, q_len, latent_dim + rope_dim]"),
        ({"norm": torch.zeros(0)}, "latent_dim is 0, expected 1 to 4096"),
        ({"norm": torch.zeros(25)}, "rope_dim is -1, expected 0 to 4096"),
        ({"kv_pool": torch.zeros(4, 2, 23)}, "kv_pool has shape [4, 2, 23], expected [num_pages, page_size, latent_dim + rope_dim=24]"),
        ({"cos_sin": TURN}, "positions is missing, expected some with cos_sin"),
        ({"q": torch.zeros(2, 3, 8)}, "q_norm is missing, expected some with q"),
        ({"q": torch.zeros(2, 3, 8), "q_norm": torch.zeros(8)}, "q_out is missing, expected some with q"),
        ({"q_out": torch.zeros(2, 3, 8)}, "q_out is given, expected none without q"),
        ({"kv_scale": 2.0}, "kv_scale is 2.000000, expected 1 for pools of float32"),
    ],
)  # fmt: skip
def test_error_messages(changes: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "norm": NORM, "kv_pool": POOL, "page_table": TABLE, "prefix_lens": LENS}
    with pytest.raises(ValueError) as error:
        sd.write_latent(**(arguments | changes))
    assert str(error.value) == f"write_latent: {message}"
    with pytest.raises(ValueError, match=r"^rope_heads: rope_dim is 3, expected an even number above 0$"):
        sd.rope_heads(torch.zeros(2, 3, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int32))
