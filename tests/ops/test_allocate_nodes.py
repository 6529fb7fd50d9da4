"""allocate_nodes against a plain sort, exact: chosen nodes and the expected gain of every budget level."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference
from support.exhaustive import exhaustive

INT = torch.int32


def check(device: torch.device, scores: torch.Tensor, budget: int, **named: torch.Tensor | None) -> sd.NodeAllocation:
    want = reference.allocate_nodes(scores, budget, **named)
    got = sd.allocate_nodes(
        scores.to(device), budget, **{k: v if v is None else v.to(device) for k, v in named.items()}
    )
    got = sd.NodeAllocation(*(field.cpu() for field in got))
    assert torch.equal(got.num_nodes, want.num_nodes)
    assert torch.equal(got.cu_seqlens, want.cu_seqlens)
    assert torch.equal(got.cuts, want.cuts)
    torch.testing.assert_close(got.expected, want.expected, rtol=1e-6, atol=0)
    return got


def falling(batch: int, nodes: int, levels: int = 0) -> torch.Tensor:
    """Return falling path scores, drawn from `levels` values if given; some rows end early."""
    steps = torch.randint(0, 3, (batch, nodes)) / levels if levels else torch.rand(batch, nodes) ** 3
    steps[:, 0] = 0
    scores = -steps.cumsum(1)
    ends = torch.randint(1, nodes + 1, (batch,))
    return scores.where((torch.arange(nodes) < ends[:, None]) | (torch.rand(batch, 1) < 0.5), -torch.inf)


@pytest.mark.sanitize
def test_allocate_nodes_of_a_worked_example(device: torch.device) -> None:
    scores = torch.tensor([[0, -0.1, -3.0, -4.0], [0, -0.1, -0.2, -3.0], [0, -1.0, -1.0, -torch.inf]])
    got = check(device, scores, 7, budget_levels=torch.tensor([3, 5, 9, 99], dtype=INT))
    assert got.num_nodes.tolist() == [2, 3, 2] and got.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert got.cuts.tolist() == [torch.inf, pytest.approx(-0.1), -3, -torch.inf]
    assert float(got.expected[1]) == pytest.approx(3 + 2 * math.exp(-0.1))
    limits, slots = torch.tensor([9, 5, 1], dtype=INT), torch.tensor([2, 0, -1], dtype=INT)
    limited = check(device, scores, 7, max_nodes=limits, slots=slots)
    assert limited.num_nodes.tolist() == [1, 4, 0]
    capped = check(
        device, scores, 7, budget_levels=torch.tensor([5, 9], dtype=INT), level_limits=torch.tensor([2, 3], dtype=INT)
    )
    assert capped.num_nodes.tolist() == [2, 3, 2] and capped.cuts.tolist() == [pytest.approx(-0.1), -torch.inf]


def test_allocate_nodes_skips_finished_and_stalled_slots(device: torch.device) -> None:
    reasons, status = torch.tensor([0, 1, 0, 0], dtype=INT), torch.tensor([0, 0, 3, 2], dtype=INT)
    got = check(device, torch.zeros(4, 5), 12, finish_reasons=reasons, status=status)
    assert got.num_nodes.tolist() == [5, 0, 0, 5]
    got = check(device, torch.zeros(2, 5), 12, slots=torch.tensor([2, 3], dtype=INT), status=status)
    assert got.num_nodes.tolist() == [0, 5]


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (1, 256), (3, 5), (64, 32), *exhaustive((256, 256)), (300, 200)])
def test_allocate_nodes_matches_sort(device: torch.device, batch: int, nodes: int) -> None:
    for levels in (0, 7):
        scores = falling(batch, nodes, levels)
        budget = int(torch.randint(batch, batch * nodes + 2, ()))
        budget_levels = torch.randint(0, batch * nodes + 2, (5,), dtype=INT)
        state = {"max_nodes": torch.randint(-1, nodes + 2, (batch + 3,), dtype=INT)}
        state |= {name: torch.randint(0, 5, (batch + 3,), dtype=INT) // 4 for name in ("finish_reasons", "status")}
        slots = torch.randint(-1, batch + 4, (batch,), dtype=INT)
        check(device, scores, budget, budget_levels=budget_levels)
        limits = torch.randint(-1, nodes + 2, (5,), dtype=INT)
        check(device, scores, budget, **state, slots=slots, budget_levels=budget_levels, level_limits=limits)


@settings(max_examples=60)
@given(data=st.data())
def test_allocate_nodes_of_random_lists_matches_sort(device: torch.device, data: st.DataObject) -> None:
    batch, nodes = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 9))
    row = st.lists(
        st.sampled_from([0.0, -0.0, 0.5, -1.0, -1.5, -1e-40, -200.0, -torch.inf]), min_size=nodes, max_size=nodes
    )
    scores = torch.tensor([sorted(data.draw(row), reverse=True) for _ in range(batch)]).reshape(batch, nodes)

    def ints(low: int, high: int, count: int) -> torch.Tensor:
        drawn = data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=INT)

    given = {}
    for name, high in (("slots", nodes + 2), ("max_nodes", nodes + 2), ("finish_reasons", 1), ("status", 3)):
        if data.draw(st.booleans()):
            given[name] = ints(-2 if high > 3 else 0, high, batch)
    count = data.draw(st.integers(0, 4))
    given["budget_levels"] = ints(-3, batch * nodes + 3, count)
    if data.draw(st.booleans()):
        given["level_limits"] = ints(-1, nodes + 1, count)
    got = check(device, scores, batch + data.draw(st.integers(0, batch * nodes + 2)), **given)
    assert list(got.num_nodes) == list(got.cu_seqlens.diff())


def test_allocate_nodes_grows_with_budget_in_every_request(device: torch.device) -> None:
    scores = falling(6, 20, 5).to(device)
    taken = torch.stack([sd.allocate_nodes(scores, budget).num_nodes for budget in range(6, 121)])
    assert bool((taken.diff(dim=0) >= 0).all()) and bool((taken.diff(dim=0).sum(1) <= 1).all())


@pytest.mark.sanitize
def test_allocate_nodes_of_unsorted_scores_stays_in_bounds(device: torch.device) -> None:
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0, -1.0, -2.0])
    for _ in range(20):
        scores = wild[torch.randint(0, 6, (7, 9))]
        got = sd.allocate_nodes(
            scores.to(device), 20, budget_levels=torch.tensor([-(2**31), 12, 2**31 - 1], dtype=INT, device=device)
        )
        same = sd.allocate_nodes(scores, 20, budget_levels=torch.tensor([-(2**31), 12, 2**31 - 1], dtype=INT))
        assert all(torch.equal(g.cpu(), s) for g, s in zip(got, same, strict=True))
        assert int(got.num_nodes.min()) >= 1 and int(got.num_nodes.max()) <= 9 and int(got.cu_seqlens[-1]) <= 20
        assert got.cu_seqlens.diff().tolist() == got.num_nodes.tolist() and bool(got.expected.isfinite().all())


SCORES = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 1}, "allocate_nodes: budget is 1, expected 2 to 2147483647"),
        ({"scores": SCORES.double()}, "allocate_nodes: scores is float64, expected float32"),
        ({"scores": torch.zeros(2, 257)}, "allocate_nodes: num_nodes is 257, expected 1 to 256"),
        ({"scores": torch.zeros(257, 256), "budget": 999}, "allocate_nodes: batch * num_nodes is 65792, expected 0 to 65536"),
        ({"max_nodes": torch.zeros(1, dtype=INT)}, "allocate_nodes: slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"max_nodes": torch.zeros(3)}, "allocate_nodes: max_nodes is float32, expected int32"),
        ({"level_limits": torch.zeros(3, dtype=INT)}, "allocate_nodes: level_limits is given, expected None, since budget_levels is None"),
        ({"slots": torch.zeros(3, dtype=INT)}, "allocate_nodes: slots has shape [3], expected [batch=2]"),
        ({"budget_levels": torch.zeros(3)}, "allocate_nodes: budget_levels is float32, expected int32"),
    ],
    ids=["budget", "dtype", "nodes", "too many", "few slots", "max_nodes", "limits", "slots", "budget_levels"],
)  # fmt: skip
def test_allocate_nodes_error_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.allocate_nodes(**({"scores": SCORES, "budget": 5} | change))
    assert str(error.value) == message
