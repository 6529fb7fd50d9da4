"""publish_results: records in order, each whole before its number stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import round as reference

INT = torch.int32
DEPTH = 3
SCORES = {
    "logprobs": torch.zeros(2, 2),
    "top_ids": torch.zeros(2, 2, 1, dtype=INT),
    "top_logprobs": torch.zeros(2, 2, 1),
}


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(INT)


def rows(batch: int, width: int, slots: int) -> dict[str, torch.Tensor]:
    row = {"out_tokens": ints(batch, width), "out_len": ints(batch), "out_path": ints(batch, width)}
    return row | {"num_nodes": ints(batch), "finish_reasons": ints(slots), "status": ints(slots)}


def ring(words: int, device: torch.device) -> torch.Tensor:
    return torch.full((DEPTH, words), -77, dtype=INT, pin_memory=device.type == "cuda")


def counter(device: torch.device | str, value: int = 0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=device)


@pytest.mark.sanitize
@pytest.mark.parametrize(("batch", "width", "slots"), [(3, 2, 5), (1, 1, 1), (0, 4, 2), (70, 33, 300)])
def test_records_in_order(device: torch.device, batch: int, width: int, slots: int) -> None:
    top_n = 3
    words = 8 + (batch + 1) * (4 + width * (3 + 2 * top_n)) + 1
    words += words % 2
    got, want = ring(words, device), ring(words, torch.device("cpu"))
    published, started_at, count = counter(device), counter(device, 5 * 2**33 + 9), counter("cpu")
    for number in range(2 * DEPTH + 1):
        given = rows(batch, width, slots)
        named = torch.randint(-2, slots + 1, (batch,), dtype=INT)
        given_on_device = {name: tensor.to(device) for name, tensor in given.items()}
        scores = sd.TokenScores(torch.randn(batch, width), ints(batch, width, top_n), torch.randn(batch, width, top_n))
        if number % 2:
            given |= scores._asdict() | {"num_logprobs": torch.randint(-2, 3, (slots,), dtype=INT)}
            given_on_device = {name: tensor.to(device) for name, tensor in given.items()}
        sd.publish_results(got, published, started_at, **given_on_device, slots=named.to(device))
        reference.publish_results(want, count, **given, slots=named)
        if device.type == "cuda":
            torch.cuda.synchronize()
        record = got[number % DEPTH]
        assert int(record[2:4].view(torch.int64)) == 5 * 2**33 + 9 and int(record[4:6].view(torch.int64)) > 0
        want[number % DEPTH, 2:6] = record[2:6]
        assert torch.equal(got, want) and int(published) == number + 1


def test_rows_without_slots(device: torch.device) -> None:
    given = {name: tensor.to(device) for name, tensor in rows(2, 1, 3).items()}
    got = ring(20, device)
    sd.publish_results(got, counter(device), counter(device), **given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert got[0, [9, 10, 15, 16]].tolist() == [
        int(given[name][slot]) for slot in (0, 1) for name in ("finish_reasons", "status")
    ]


@pytest.mark.parametrize("count", [-1, -(2**63), 2**63 - 1])
def test_any_count_names_a_record(device: torch.device, count: int) -> None:
    given = {name: tensor.to(device) for name, tensor in rows(1, 1, 1).items()}
    got = ring(14, device)
    sd.publish_results(got, counter(device, count), counter(device), **given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(got[count % 2**64 % DEPTH, 0]) == ((count + 1 + 2**31) % 2**32) - 2**31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": torch.zeros(3, 22, dtype=INT)}, "publish_results: words is 22, expected 24 to 2147483647"),
        ({"results": torch.zeros(0, 24, dtype=INT)}, "publish_results: depth is 0, expected 1 to 2147483647"),
        ({"results": torch.zeros(3, 25, dtype=INT)}, "publish_results: results has rows that start between two multiples of 8 bytes, expected an aligned tensor with an even number of words"),
        ({"out_len": torch.zeros(3, dtype=INT)}, "publish_results: out_len has shape [3], expected [batch=2]"),
        ({"out_path": torch.zeros(2, 3, dtype=INT)}, "publish_results: out_path has shape [2, 3], expected [batch=2, accept_width=2]"),
        ({"status": torch.zeros(4, dtype=INT)}, "publish_results: status has shape [4], expected [num_slots=3]"),
        (SCORES | {"num_logprobs": torch.zeros(3, dtype=INT)}, "publish_results: words is 24, expected 36 to 2147483647"),
        (SCORES, "publish_results: num_logprobs is None, expected a tensor, since logprobs is given"),
        ({"num_logprobs": torch.zeros(3, dtype=INT)}, "publish_results: num_logprobs is given, expected None, since logprobs is None"),
        ({"num_published": torch.zeros(1, dtype=INT)}, "publish_results: num_published is int32, expected int64"),
    ],
    ids=["words", "depth", "alignment", "out_len", "out_path", "status", "words of scores", "scores alone", "no scores", "counter"],
)  # fmt: skip
def test_messages(change: dict[str, Any], message: str) -> None:
    ready = {"results": ring(24, torch.device("cpu")), "num_published": counter("cpu"), "started_at": counter("cpu")}
    with pytest.raises(ValueError) as error:
        sd.publish_results(**(ready | rows(2, 2, 3) | change))
    assert str(error.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_what_the_device_cannot_reach() -> None:
    given = {name: tensor.cuda() for name, tensor in rows(1, 1, 1).items()}
    with pytest.raises(ValueError, match="publish_results: results is not pinned, expected a pinned or cuda tensor"):
        sd.publish_results(torch.zeros(3, 14, dtype=INT), counter("cuda"), counter("cuda"), **given)
