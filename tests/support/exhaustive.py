"""Parameters that only an exhaustive run uses, because others cover the same code: `pytest -m exhaustive` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Return parameters for the exhaustive run; a tuple stands for several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]


def thinned(values: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Return all values; those not in `keep` are for the exhaustive run alone."""
    return [value if kept(value) else exhaustive(value)[0] for value in values]


def covering(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs; the default run uses a few that show each value of both once."""
    first, second = list(first), list(second)
    chosen = {(i % len(first), i % len(second)) for i in range(max(len(first), len(second)))}
    pairs = [(i, j) for i in range(len(first)) for j in range(len(second))]
    return [(first[i], second[j]) if (i, j) in chosen else exhaustive((first[i], second[j]))[0] for i, j in pairs]


def representative(drafts: Iterable[str]) -> list[Any]:
    """Return all names of drafts; the default run uses one for each kind of round.

    A union of EAGLE-3 and n-grams runs the trees of both and their merge, a standalone model has KV and pages of its own,
    and a drawn chain is verified by sampling. Where there is no union, trees and n-grams stay. Plain decoding is what
    their texts are compared with.
    """
    names = list(drafts)
    unions = [name for name in names if name == "union" or "+" in name]
    others = ("standalone", "drawn", "sampled", *(() if unions else ("tree", "ngram")))
    kept = {*unions, *(name for name in names if any(part in name for part in others))}
    assert kept, names
    return thinned(names, kept.__contains__)
