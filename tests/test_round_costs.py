"""How many nodes to draft."""

from __future__ import annotations

import math

import pytest

import specdec_kernels as sd

# Memory-bound up to some 64 rows in all, then each row costs.
NODES = (1, 4, 16, 64)
COSTS = sd.RoundCosts((1, 4, 16, 64), NODES, [[5e3 + 60 * max(0, b * n - 64) for n in NODES] for b in (1, 4, 16, 64)])


def falling(rate: float) -> list[float]:
    """Accepted drafts, where node i is accepted at rate**i."""
    return [sum(rate**i for i in range(1, nodes)) for nodes in NODES]


def test_a_large_batch_drafts_fewer() -> None:
    sizes = [COSTS.choose_num_nodes(batch, falling(0.9)) for batch in (1, 2, 4, 5, 16, 17, 64, 1000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 and sizes[-1] < 16


def test_better_drafts_are_longer() -> None:
    sizes = [COSTS.choose_num_nodes(16, falling(rate)) for rate in (0.0, 0.1, 0.5, 0.9, 0.99)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] > 4


def test_nothing_to_gain_is_no_draft() -> None:
    flat = sd.RoundCosts([8], [1, 8], [[1.0, 1.0]])
    assert flat.choose_num_nodes(1, [0, 0]) == 1  # equal: the least
    assert flat.choose_num_nodes(1, [0, 1e-6]) == 8


@pytest.mark.parametrize("batch", [1, 3, 4, 11, 16, 60, 99])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_is_the_best_by_exhaustion(batch: int, rate: float) -> None:
    row = sum(batch > rows for rows in COSTS.batches[:-1])
    best = max(range(4), key=lambda j: (1 + falling(rate)[j]) / COSTS.us[row][j])
    assert COSTS.choose_num_nodes(batch, falling(rate)) == NODES[best]


@pytest.mark.parametrize(
    ("batches", "nodes", "us", "message"),
    [
        ([], [1], [], "RoundCosts: batches is [], expected rising numbers from 1 on"),
        ([1, 1], [1], [[1.0], [1.0]], "RoundCosts: batches is [1, 1], expected rising numbers from 1 on"),
        ([1], [0, 4], [[1.0, 1.0]], "RoundCosts: nodes is [0, 4], expected rising numbers from 1 on"),
        ([1, 2], [1], [[1.0]], "RoundCosts: us has rows of [1], expected 2 of 1"),
        ([1], [1, 2], [[1.0]], "RoundCosts: us has rows of [1], expected 1 of 2"),
        ([1], [1], [[0.0]], "RoundCosts: us has 0.000000, expected times above 0"),
        ([1], [1], [[math.nan]], "RoundCosts: us has nan, expected times above 0"),
    ],
)
def test_messages(batches: list[int], nodes: list[int], us: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.RoundCosts(batches, nodes, us)
    assert str(error.value) == message


def test_messages_of_a_choice() -> None:
    with pytest.raises(ValueError, match=r"^choose_num_nodes: batch is 0, expected at least 1$"):
        COSTS.choose_num_nodes(0, falling(0.5))
    with pytest.raises(ValueError, match=r"^choose_num_nodes: accepted has 2 entries, expected 4$"):
        COSTS.choose_num_nodes(1, [0, 1])
