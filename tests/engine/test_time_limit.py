"""Limits of time for Python code: loops end, and what has returned is not interrupted later."""

from __future__ import annotations

import time
from itertools import count

import pytest

from specdec_kernels.engine.text.time_limit import TimeLimitError, within


def test_loop_ends_after_its_time() -> None:
    with pytest.raises(TimeLimitError):
        within(0.1, lambda: max(number for number in count()))


def test_call_within_its_time_returns_or_raises_as_it_does() -> None:
    assert within(5, lambda: "a") == "a"
    with pytest.raises(KeyError):
        within(5, lambda: {}["a"])


def test_no_call_is_interrupted_after_its_end() -> None:
    """Time limits about as long as the call: either it returns, or the limit is raised from it, and never later."""
    outcomes = set()
    for number in range(300):
        try:
            outcomes.add(within(number * 1e-5, lambda: sum(range(20_000)) > 0))
        except TimeLimitError:
            outcomes.add(False)
        time.sleep(1e-4)
    assert True in outcomes
