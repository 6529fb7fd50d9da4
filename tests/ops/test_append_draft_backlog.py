"""append_draft_backlog against its row-by-row reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

INT = torch.int32


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=INT)


def inputs(
    batch: int, accept_width: int, num_nodes: int, ring: int, width: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Return arguments with more slots than requests; some rows are empty."""
    num_slots = batch + 3
    slots = torch.randperm(num_slots)[:batch].int()
    slots[::4] = -1
    given: dict[str, Any] = {
        "tokens": ints(-1, 50000, batch, accept_width),
        "path": ints(0, max(num_nodes, 1), batch, accept_width),
        "num_valid": ints(0, accept_width + 1, batch),
        "backlog_lens": ints(0, 99, num_slots),
        "backlog_tokens": ints(0, 9, num_slots, ring),
        "slots": slots,
    }
    if width is not None:
        given["features"] = torch.randn(batch, num_nodes, width).to(dtype)
        given["backlog_features"] = torch.full((num_slots, ring, width), -77).to(dtype)
    return given


def check(device: torch.device, given: dict[str, Any]) -> None:
    got = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
    reference.append_draft_backlog(**given)
    sd.append_draft_backlog(**got)
    for name, want in given.items():
        assert torch.equal(got[name].cpu(), want), name


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("batch", "accept_width", "num_nodes", "ring", "width", "dtype"),
    [
        (0, 3, 4, 16, 8, torch.float32),
        (1, 1, 1, 1, 1, torch.bfloat16),
        (5, 6, 32, 16, 64, torch.float16),
        (67, 6, 4, 4, 33, torch.bfloat16),  # more rows than a ring has
        (3, 1, 1, 16, 12288, torch.bfloat16),  # of a head over a model of 4096
        (2, 2, 3, 5, 20001, torch.float32),
        (9, 4, 4, 16, None, torch.float32),  # a standalone draft model: tokens alone
        (9, 4, 0, 16, 8, torch.float32),  # features without rows: nothing to append
        (9, 4, 4, 16, 0, torch.float32),  # features without columns: tokens alone
    ],
)
def test_append_draft_backlog_matches_reference(
    batch: int,
    accept_width: int,
    num_nodes: int,
    ring: int,
    width: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    given = inputs(batch, accept_width, num_nodes, ring, width, dtype)
    check(device, given)
    check(device, given)  # after the rows of the first call


@pytest.mark.sanitize
def test_append_draft_backlog_of_packed_rows_matches_reference(device: torch.device) -> None:
    """Requests have 0 to 4 nodes; a request without nodes appends nothing."""
    counts = torch.tensor([1, 0, 4, 2, 0])
    given = inputs(5, 3, 4, 4, 6, torch.float32)
    given["slots"] = None
    given["num_valid"].fill_(2)
    ends = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(INT)
    given |= {"features": torch.randn(9, 6), "cu_seqlens_q": ends}  # two rows belong to no request
    before = given["backlog_lens"].clone()
    check(device, {name: value for name, value in given.items() if value is not None})
    assert (given["backlog_lens"] - before).tolist() == [2, 0, 2, 2, 0, 0, 0, 0]


@pytest.mark.sanitize
def test_append_draft_backlog_skips_requests_without_nodes_if_features_are_empty(device: torch.device) -> None:
    """Features without columns still count as features: a request without nodes appends nothing."""
    given = inputs(2, 3, 4, 4, None, torch.float32)
    given |= {"slots": torch.arange(2).int(), "cu_seqlens_q": torch.tensor([0, 0, 4]).to(INT)}
    given |= {"features": torch.zeros(4, 0), "backlog_features": torch.zeros(5, 4, 0)}
    given["num_valid"].fill_(2)
    before = given["backlog_lens"].clone()
    check(device, given)
    assert (given["backlog_lens"] - before).tolist() == [0, 2, 0, 0, 0]


@pytest.mark.sanitize
def test_append_draft_backlog_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    wild = torch.tensor([-1, -(2**31), 2**31 - 1], dtype=INT)
    ring = torch.zeros(3, 4, 2, device=device)
    arguments = [
        torch.stack([wild] * 3),
        torch.stack([wild] * 3),
        wild.flip(0),
        wild.clone(),
        torch.zeros(3, 4, dtype=INT),
    ]
    there = [argument.to(device) for argument in arguments]
    ends = torch.tensor([-5, 3, 1, 2**31 - 1], dtype=INT, device=device)
    sd.append_draft_backlog(*there, features=torch.ones(4, 2, device=device), backlog_features=ring, cu_seqlens_q=ends)
    assert not ring.any() and there[3].tolist() == wild.tolist()  # no request has rows that are there
    sd.append_draft_backlog(*there, features=torch.ones(3, 3, 2, device=device), backlog_features=ring)
    assert ring[0].sum() == 6 and not ring[1:].any()
    assert there[3].tolist() == [2, -(2**31), 2**31 - 1]
    there[2].fill_(3)
    sd.append_draft_backlog(*there)
    assert there[4].max() == 2**31 - 1 and there[4].min() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ints(0, 4, 2, 4)}, "append_draft_backlog: path has shape [2, 4], expected [batch=2, accept_width=3]"),
        ({"backlog_tokens": ints(0, 4, 4, 8)}, "append_draft_backlog: backlog_tokens has shape [4, 8], expected [num_slots=5, ring]"),
        ({"backlog_tokens": ints(0, 4, 5, 0)}, "append_draft_backlog: ring is 0, expected 1 to 2147483647"),
        ({"backlog_features": None}, "append_draft_backlog: backlog_features is None with features, expected both or none of them"),
        ({"features": None}, "append_draft_backlog: backlog_features is a tensor without features, expected both or none of them"),
        ({"backlog_features": torch.zeros(5, 8, 6).half()}, "append_draft_backlog: backlog_features is float16, expected float32"),
        ({"backlog_features": torch.zeros(5, 8, 7)}, "append_draft_backlog: backlog_features has shape [5, 8, 7], expected [num_slots=5, ring=8, width=6]"),
        ({"features": torch.zeros(8, 6)}, "append_draft_backlog: features has shape [8, 6], expected [batch=2, num_nodes, width]"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=INT)}, "append_draft_backlog: cu_seqlens_q has shape [2], expected [batch + 1=3]"),
    ],
)  # fmt: skip
def test_append_draft_backlog_error_messages(change: dict[str, Any], message: str, device: torch.device) -> None:
    arguments = inputs(2, 3, 4, 8, 6, torch.float32) | change
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ValueError) as error:
        sd.append_draft_backlog(**there)
    assert str(error.value) == message
