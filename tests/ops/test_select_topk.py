"""select_topk against its float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(logits: torch.Tensor, k: int, id_map: torch.Tensor | None = None) -> None:
    ids, logprobs = sd.select_topk(logits, k, id_map=id_map)
    want_ids, want_logprobs = reference.select_topk(logits.cpu(), k, None if id_map is None else id_map.cpu())
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(logprobs.cpu().double(), want_logprobs, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 1, 1), (3, 7, 7), (5, 127, 8), (2, 32000, 10), (1, 128256, 64)])
def test_select_topk_matches_reference(device: torch.device, dtype: torch.dtype, rows: int, vocab: int, k: int) -> None:
    # 16-bit logits over a large vocabulary tie often; the contract includes the order of ties.
    check(torch.randn(rows, vocab, device=device).to(dtype), k)


@pytest.mark.sanitize
def test_select_topk_with_id_map_matches_reference(device: torch.device) -> None:
    id_map = torch.randperm(33, device=device).to(torch.int32)
    check(torch.randn(4, 33, device=device), 5, id_map)


def test_select_topk_of_strided_rows_and_unaligned_pointer_matches_reference(device: torch.device) -> None:
    wide = torch.randn(6, 101, device=device)
    check(wide[::2, 1:100], 9)


def test_select_topk_of_nan_and_minus_infinity(device: torch.device) -> None:
    logits = torch.full((3, 6), -torch.inf, device=device)
    logits[0, 4] = 1.0
    logits[1] = torch.nan
    logits[2] = torch.tensor([torch.nan, 2.0, -torch.inf, 2.0, 1.0, torch.nan])
    check(logits, 6)


def test_select_topk_gives_plus_infinity_the_whole_probability(device: torch.device) -> None:
    inf = torch.inf
    logits = torch.tensor([[0.0, inf, 1.0, torch.nan], [inf, -inf, inf, 3.0], [inf, inf, inf, inf]], device=device)
    check(logits, 4)
    _, logprobs = sd.select_topk(logits, 2)
    torch.testing.assert_close(logprobs.cpu().exp(), torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.25]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(2, 50000, 64), (1, 300001, 20), (30, 2048, 64), (300, 1030, 13)])
def test_select_topk_of_massive_ties(device: torch.device, dtype: torch.dtype, rows: int, vocab: int, k: int) -> None:
    check(torch.zeros(rows, vocab, device=device, dtype=dtype), k)
    check(torch.randn(rows, vocab, device=device).round().to(dtype), k)
    masked = torch.full((rows, vocab), -torch.inf, device=device, dtype=dtype)
    masked[:, 77::777] = 1
    check(masked, k)


def test_select_topk_of_wide_range(device: torch.device) -> None:
    check(torch.randn(3, 9999, device=device).exp().exp() * torch.tensor([[1.0], [-1.0], [0.01]], device=device), 11)
    for limit in (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min):
        ids, logprobs = sd.select_topk(torch.full((2, 7000), limit, device=device), 3)
        assert ids.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(logprobs.cpu(), torch.full((2, 3), -math.log(7000)))


def test_select_topk_rows_do_not_depend_on_batch(device: torch.device) -> None:
    # On a GPU, clusters of blocks share each of few rows, not of many: ids are equal, probabilities nearly.
    logits = torch.randn(300, 5003, device=device)
    ids, logprobs = sd.select_topk(logits, 10)
    few_ids, few_logprobs = sd.select_topk(logits[7:9], 10)
    assert torch.equal(ids[7:9], few_ids)
    torch.testing.assert_close(logprobs[7:9], few_logprobs, rtol=0, atol=2e-6)


def rows_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab)
    if kind == "rises":
        logits = logits.sort(dim=1).values
    elif kind == "few scores":
        logits = logits.round()
    elif kind == "the best side by side":
        logits[:, 7000:8000] += 20
    elif kind == "far above the beginning":
        logits[::2, -40:] += 300
    elif kind == "nothing at the beginning":
        logits[:, :-100] = -torch.inf
    elif kind == "infinities":
        logits[::3, 8100:8110] = torch.inf
        logits[1::3, 17] = torch.inf
    elif kind == "NaN":
        logits[torch.rand(rows, vocab) < 0.01] = torch.nan
        logits[::7] = torch.nan
    return logits


KINDS = ("any", "rises", "few scores", "the best side by side", "far above the beginning", "nothing at the beginning", "infinities", "NaN")  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_select_topk_of_many_rows(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    # More rows than a GPU runs at a time, each longer than its threads read at a time.
    rows, vocab = 300 if device.type == "cuda" else 3, 13001
    logits = rows_of(kind, rows, vocab).to(device=device, dtype=dtype)
    check(logits, 10)
    check(logits[:, 1:], 3)


@pytest.mark.sanitize
def test_select_topk_of_many_rows_of_few_kinds(device: torch.device) -> None:
    rows = 300 if device.type == "cuda" else 3
    check(torch.cat([rows_of(kind, rows // 3, 12301) for kind in ("any", "rises", "NaN")]).to(device).half(), 5)


def test_select_topk_overwrites_all_outputs(device: torch.device) -> None:
    logits = torch.randn(5, 333, device=device)
    out = sd.TopK(
        torch.full((5, 7), -77, dtype=torch.int32, device=device), torch.full((5, 7), torch.nan, device=device)
    )
    assert sd.select_topk(logits, 7, out=out) is out
    assert torch.equal(out.ids.cpu(), reference.select_topk(logits.cpu(), 7)[0]) and not out.logprobs.isnan().any()


def test_select_topk_of_single_column(device: torch.device) -> None:
    check(torch.tensor([[3.0], [-torch.inf], [torch.inf], [torch.nan]], device=device), 1)


def test_select_topk_accepts_empty_batch(device: torch.device) -> None:
    ids, logprobs = sd.select_topk(torch.empty(0, 5, device=device), 2)
    assert ids.shape == logprobs.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "select_topk: logits is int32, expected float32 or float16 or bfloat16"),
        ({"logits": torch.zeros(8, 2).t()}, "select_topk: logits has shape [2, 8] and is not contiguous in its last dimension, expected a last stride of 1"),
        ({"id_map": torch.zeros(7, dtype=torch.int32)}, "select_topk: id_map has shape [7], expected [vocab=8]"),
        ({"out": sd.TopK(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2))}, "select_topk: out.ids has shape [3, 2], expected [rows=2, k=2]"),
        ({"out": sd.TopK(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3))}, "select_topk: out.ids has shape [2, 3], expected [rows=2, k=2]"),
        ({"logits": torch.zeros(2, 0), "k": 1}, "select_topk: vocab is 0, expected 1 to 2147483647"),
        ({"k": 9}, "select_topk: k is 9, expected 1 to 8"),
        ({"k": 0}, "select_topk: k is 0, expected 1 to 8"),
    ],
)  # fmt: skip
def test_select_topk_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 8), "k": 2} | change
    with pytest.raises(ValueError) as error:
        sd.select_topk(**arguments)
    assert str(error.value) == message
