"""Costs of rounds that depend on no clock, for engines whose rounds are not to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specdec_kernels._C import RoundCosts
from specdec_kernels.engine import loading
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.tuning import costs_for

# A row of these costs 11 days. The cost model believes at most a quarter of a surprise, so that every round changes the
# estimates in the same way, however long it takes.
MICROSECONDS = 1e12
# A round costs as much as this many rows before it has any, and catching up as much as this many rows per request.
OVERHEAD, CATCH_UP = 16, 4


def fixed_costs(config: EngineConfig) -> RoundCosts:
    """Return the costs of an engine's rounds, which rise with their rows."""
    batches, rows = list(config.batch_sizes), [list(levels) for levels in config.rows]
    us = [[MICROSECONDS * (OVERHEAD + count) for count in levels] for levels in rows]
    catch_up = [MICROSECONDS * CATCH_UP * batch for batch in batches] if config.max_idle_rounds > 0 else []
    return RoundCosts(batches, rows, us, catch_up)


def known_costs(tuning: dict[str, Any], rounds: dict[str, Any], config: EngineConfig) -> RoundCosts | None:
    """Return the costs that a tuning has (`costs_for`), else `fixed_costs`; None if nothing is to be chosen by them."""
    found = costs_for(tuning, rounds, config)
    return fixed_costs(config) if found is None and config.num_levels > 0 else found


@contextmanager
def fixed() -> Iterator[None]:
    """Start engines as if every tuning had costs: nothing is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "costs_for", known_costs)
        yield


@contextmanager
def measured() -> Iterator[None]:
    """Start engines as they start elsewhere: costs are measured unless a tuning has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "costs_for", costs_for)
        yield
