"""How many nodes to draft."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_kernels as sd

# Memory-bound up to some 64 rows in all, then each row costs.
COSTS = sd.RoundCosts(
    batches=(1, 4, 16, 64),
    nodes=(1, 4, 16, 64),
    seconds=[[5.0 + max(0, batch * nodes - 64) / 16 for nodes in (1, 4, 16, 64)] for batch in (1, 4, 16, 64)],
)


def falling(rate: float, nodes: int = 64) -> list[float]:
    return [1.0, *(rate**i for i in range(1, nodes))]


def test_a_large_batch_drafts_fewer() -> None:
    sizes = [sd.choose_num_nodes(batch, falling(0.9), COSTS) for batch in (1, 2, 4, 5, 16, 17, 64, 1000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 and sizes[-1] < 16


def test_better_drafts_are_longer() -> None:
    sizes = [sd.choose_num_nodes(16, falling(rate), COSTS) for rate in (0.0, 0.1, 0.5, 0.9, 0.99)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] > 4


def test_nothing_to_gain_is_no_draft() -> None:
    flat = sd.RoundCosts((8,), (1, 8), [[1.0, 1.0]])
    assert sd.choose_num_nodes(1, [], flat) == sd.choose_num_nodes(1, [0.7], flat) == 1  # equal: the least
    assert sd.choose_num_nodes(1, [0.7, 1e-6], flat) == 8
    assert sd.choose_num_nodes(1, [], sd.RoundCosts((8,), (4, 8), [[1.0, 1.0]])) == 4


@pytest.mark.parametrize("batch", [1, 3, 4, 11, 16, 60, 99])
def test_is_the_best_by_exhaustion(batch: int) -> None:
    scores = torch.randn(5, 40).abs().neg().cumsum(1) / 5
    scores[2, 17:] = -math.inf  # a tree that ended
    probs = scores.exp().mean(0).tolist()
    row = sum(batch > rows for rows in COSTS.batches[:-1])
    best = max(range(4), key=lambda j: (1 + sum(probs[1 : COSTS.nodes[j]])) / COSTS.seconds[row][j])
    assert sd.choose_num_nodes(batch, probs, COSTS) == COSTS.nodes[best]


@pytest.mark.parametrize(
    ("batches", "nodes", "seconds", "message"),
    [
        ([], [1], [], "RoundCosts: batches is [], expected rising numbers from 1 on"),
        ([1, 1], [1], [[1.0], [1.0]], "RoundCosts: batches is [1, 1], expected rising numbers from 1 on"),
        ([1], [0, 4], [[1.0, 1.0]], "RoundCosts: nodes is [0, 4], expected rising numbers from 1 on"),
        ([1, 2], [1], [[1.0]], "RoundCosts: seconds has rows of [1], expected 2 of 1"),
        ([1], [1, 2], [[1.0]], "RoundCosts: seconds has rows of [1], expected 1 of 2"),
        ([1], [1], [[0.0]], "RoundCosts: seconds has 0.0, expected times above 0"),
        ([1], [1], [[math.nan]], "RoundCosts: seconds has nan, expected times above 0"),
    ],
)
def test_messages(batches: list[int], nodes: list[int], seconds: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.RoundCosts(batches, nodes, seconds)
    assert str(error.value) == message


def test_batch_message() -> None:
    with pytest.raises(ValueError, match=r"^choose_num_nodes: batch is 0, expected at least 1$"):
        sd.choose_num_nodes(0, [], COSTS)
