"""How many nodes to draft: as many as pay for themselves at this batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class _RoundCosts(NamedTuple):
    batches: Sequence[int]
    nodes: Sequence[int]
    seconds: Sequence[Sequence[float]]


class RoundCosts(_RoundCosts):
    """What a round costs, measured on the machine that runs it.

    Attributes:
        batches: rising numbers of rows that a round may have (of a round with fewer, the next one counts).
        nodes: rising numbers of nodes that its trees may have, root included.
        seconds: seconds[i][j] of a round with batches[i] rows of nodes[j] nodes.
    """

    __slots__ = ()

    def __new__(cls, batches: Sequence[int], nodes: Sequence[int], seconds: Sequence[Sequence[float]]) -> RoundCosts:
        for name, values in (("batches", batches), ("nodes", nodes)):
            if not values or values[0] < 1 or not all(low < high for low, high in pairwise(values)):
                raise ValueError(f"RoundCosts: {name} is {list(values)}, expected rising numbers from 1 on")
        shape = [len(row) for row in seconds]
        if shape != [len(nodes)] * len(batches):
            raise ValueError(f"RoundCosts: seconds has rows of {shape}, expected {len(batches)} of {len(nodes)}")
        for row in seconds:
            for value in row:
                if not 0 < value < float("inf"):
                    raise ValueError(f"RoundCosts: seconds has {value}, expected times above 0")
        return super().__new__(cls, batches, nodes, seconds)


def choose_num_nodes(batch: int, node_probs: Sequence[float], costs: RoundCosts) -> int:
    """The number of nodes in `costs.nodes` that promises most tokens a second; of equal ones the least.

    A round of n nodes emits a token a row, and of each node the probability that it is accepted: the more rows share
    the time, the less a node of small probability is worth it, and with a large batch 1, no draft, may be best.

    Args:
        batch: rows of the round; above the last of `costs.batches`, that one counts.
        node_probs: of node i, root first, the chance to be accepted, as a mean over the rows: `scores.exp().mean(0)` of
            trees grown best first. The root's is ignored, what is missing counts as 0.
        costs: where 1 is among its nodes, not to draft is a choice.

    Raises:
        ValueError: a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"choose_num_nodes: batch is {batch}, expected at least 1")
    row = next((i for i, rows in enumerate(costs.batches) if rows >= batch), len(costs.batches) - 1)
    rates = [
        (1 + sum(node_probs[1:nodes])) / seconds for nodes, seconds in zip(costs.nodes, costs.seconds[row], strict=True)
    ]
    return costs.nodes[rates.index(max(rates))]
