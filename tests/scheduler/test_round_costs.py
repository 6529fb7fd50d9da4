"""What can be no costs of rounds."""

from __future__ import annotations

import math

import pytest

from specdec_kernels._C import RoundCosts


def test_catch_up_costs_error_messages() -> None:
    for catch_up, message in (
        ([1.0], "catch_up has 1, expected 2 like batches, or none"),
        ([1.0, -2.0], "catch_up has -2.000000, expected times above 0"),
    ):
        with pytest.raises(ValueError) as error:
            RoundCosts([1, 2], [[1], [2]], [[1.0], [1.0]], catch_up)
        assert str(error.value) == f"RoundCosts: {message}"


@pytest.mark.parametrize(
    ("batches", "rows", "us", "message"),
    [
        ([], [], [], "batches is [], expected increasing values from 1 on"),
        ([1, 1], [[1], [1]], [[1.0], [1.0]], "batches is [1, 1], expected increasing values from 1 on"),
        ([1, 2], [[1]], [[1.0]], "rows has 1 lists, expected 2 like batches"),
        (
            [2],
            [[1, 4]],
            [[1.0, 1.0]],
            "rows[0] is [1, 4], expected increasing values from 2 on, at least a row per request",
        ),
        (
            [1],
            [[4, 4]],
            [[1.0, 1.0]],
            "rows[0] is [4, 4], expected increasing values from 1 on, at least a row per request",
        ),
        ([1, 2], [[1], [2, 3]], [[1.0], [1.0]], "us has lists of [1, 1], expected [1, 2] like rows"),
        ([1], [[1, 2]], [[1.0]], "us has lists of [1], expected [2] like rows"),
        ([1], [[1]], [[0.0]], "us has 0.000000, expected times above 0"),
        ([1], [[1]], [[math.nan]], "us has nan, expected times above 0"),
    ],
)
def test_round_costs_error_messages(
    batches: list[int], rows: list[list[int]], us: list[list[float]], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        RoundCosts(batches, rows, us)
    assert str(error.value) == f"RoundCosts: {message}"
