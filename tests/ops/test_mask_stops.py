"""mask_stops against its reference, bitwise; nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

INT = torch.int32


def check(logits: torch.Tensor, *rest: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
    want = logits.cpu().clone()
    reference.mask_stops(want, *rest, slots=slots)
    there = [tensor.to(logits.device) for tensor in rest]
    sd.mask_stops(logits, *there, slots=None if slots is None else slots.to(logits.device))
    assert torch.equal(logits.cpu(), want)
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "vocab", "slots", "stops"), [(1, 1, 1, 1, 1), (3, 40, 7, 5, 16), (70, 5, 33, 80, 3), (2, 3, 9, 2, 0)]
)  # fmt: skip
def test_mask_stops_matches_reference(
    device: torch.device, dtype: torch.dtype, batch: int, nodes: int, vocab: int, slots: int, stops: int
) -> None:
    wide = torch.randn(batch, 2 * nodes, vocab + 3, device=device).to(dtype)
    logits = wide[:, ::2, 2:-1]  # between others
    before = wide.clone()
    named = torch.cat([torch.randperm(slots), torch.tensor([-1, slots])]).to(INT)
    check(
        logits,
        torch.randint(0, 12, (batch, nodes), dtype=INT),
        torch.randint(-1, vocab, (slots, stops), dtype=INT),
        torch.randint(-1, 14, (slots,), dtype=INT),
        slots=named[torch.randperm(slots + 2)][:batch].contiguous(),
    )
    before[:, ::2, 2:-1] = logits
    assert torch.equal(before, wide)


@pytest.mark.sanitize
def test_mask_stops_of_a_worked_example(device: torch.device) -> None:
    logits = torch.zeros(2, 3, 5, device=device)
    positions = torch.tensor([[7, 8, 9], [7, 8, 9]], dtype=INT)
    check(logits, positions, torch.tensor([[3, -1], [0, 5]], dtype=INT), torch.tensor([10, 9], dtype=INT))
    masked = logits.isinf().nonzero().tolist()
    assert masked == [[0, 0, 3], [0, 1, 3], [1, 0, 0]]  # the next tokens have positions 8, 9 and 10


def test_mask_stops_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    wild = [-(2**31), -1, 0, 2**31 - 1]
    positions = torch.tensor([wild] * 4, dtype=INT)
    stops = torch.tensor([[w, 4] for w in wild], dtype=INT)
    check(torch.zeros(4, 4, 5, device=device), positions, stops, torch.tensor(wild, dtype=INT))


def test_mask_stops_accepts_empty_batch(device: torch.device) -> None:
    none = torch.zeros(0, 3, dtype=INT)
    check(torch.zeros(0, 3, 5, device=device), none, torch.zeros(2, 1, dtype=INT), torch.zeros(2, dtype=INT))


MANY = torch.zeros(2, 2**14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, 8, dtype=INT)}, "mask_stops: logits is int32, expected float32 or float16 or bfloat16"),
        ({"positions": torch.zeros(2, 4, dtype=INT)}, "mask_stops: positions has shape [2, 4], expected [batch=2, num_nodes=3]"),
        ({"stops_from": torch.zeros(3, dtype=INT)}, "mask_stops: stops_from has shape [3], expected [num_slots=2]"),
        ({"stop_tokens": torch.zeros(2, 4)}, "mask_stops: stop_tokens is float32, expected int32"),
        ({"slots": torch.zeros(3, dtype=INT)}, "mask_stops: slots has shape [3], expected [batch=2]"),
        ({"logits": MANY[..., None], "positions": MANY.int(), "stop_tokens": torch.empty(2, 2**17, dtype=INT)}, "mask_stops: num_nodes * max_stops is 2147483648, expected 0 to 2147483647"),
    ],
    ids=["dtype", "positions", "stops_from", "stop_tokens", "slots", "too many"],
)  # fmt: skip
def test_mask_stops_error_messages(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 3, 8),
        "positions": torch.zeros(2, 3, dtype=INT),
        "stop_tokens": torch.zeros(2, 4, dtype=INT),
        "stops_from": torch.zeros(2, dtype=INT),
    }
    with pytest.raises(ValueError) as error:
        sd.mask_stops(**(arguments | change))
    assert str(error.value) == message
