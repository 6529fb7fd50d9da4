"""Trees, sampling options and distribution checks for verification ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import specdec_kernels as sd

Sampling = dict[str, Tensor]


def sampling(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    seeds: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> Sampling:
    n = len(temperature)
    return {
        "temperature": torch.tensor(temperature, device=device),
        "top_k": torch.tensor(top_k or [0] * n, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p or [1.0] * n, device=device),
        "min_p": torch.tensor(min_p or [0.0] * n, device=device),
        "seeds": torch.tensor(seeds or list(range(n)), dtype=torch.int64, device=device),
    }


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds once in about 10 million, after Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 5.2 * math.sqrt(2 / (9 * degrees))) ** 3


def assert_distributed(tokens: Tensor, p: Tensor) -> None:
    counts = torch.bincount(tokens.long(), minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    rare = expected < 5
    observed, expected = (
        torch.cat([counts[~rare], counts[rare].sum()[None]]),
        torch.cat([expected[~rare], expected[rare].sum()[None]]),
    )
    cells = expected > 0
    statistic = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    assert statistic <= chi_square_limit(max(int(cells.sum()) - 1, 1)), statistic


WILD = (-1, 2**31 - 1, -(2**31))


def tree_of(parents: list[int], tokens: list[int], width: int | None = None) -> sd.Tree:
    """Return one well-formed tree of `len(parents)` nodes in rows of `width`; rows after the nodes hold garbage."""
    nodes = len(parents)
    width = width or nodes
    first_child, next_sibling = [-1] * nodes, [-1] * nodes
    for child in range(nodes - 1, 0, -1):
        next_sibling[child] = first_child[parents[child]]
        first_child[parents[child]] = child

    def row(values: list[int]) -> torch.Tensor:
        padding = [WILD[i % 3] for i in range(width - nodes)]
        return torch.tensor([values + padding], dtype=torch.int32)

    zeros = torch.zeros(1, width, dtype=torch.int32)
    return sd.Tree(
        tokens=row(tokens),
        parents=row(parents),
        positions=zeros,
        first_child=row(first_child),
        next_sibling=row(next_sibling),
        mask=torch.zeros(1, width, (width + 63) // 64, dtype=torch.int64),
        num_nodes=torch.tensor([nodes], dtype=torch.int32),
    )
