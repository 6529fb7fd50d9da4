"""Fixtures of all tests, the seeds that make the default run deterministic, and the choice of cases that are left out."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from support import round_costs, tiny_target
from support.devices import HAS_CUDA, on_cuda


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw the same examples in every run, and new ones in an exhaustive run; time never fails a test."""
    unaffected = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    common: dict[str, Any] = {"deadline": None, "suppress_health_check": unaffected}
    hypothesis.settings.register_profile("new seeds", **common)
    hypothesis.settings.register_profile("fixed seeds", derandomize=True, **common)
    hypothesis.settings.load_profile("new seeds" if "exhaustive" in config.option.markexpr else "fixed seeds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive, real and contracts cases that neither -m nor a node id asks for.

    On a GPU, of the exhaustive ones only those of the CPU alone.
    """
    if config.option.markexpr:
        return
    named = [(Path(file).resolve(), test) for file, _, test in (arg.partition("::") for arg in config.args) if test]

    def is_named(item: pytest.Item) -> bool:
        test = item.nodeid.partition("::")[2]
        return any(item.path == file and (test == name or test.startswith(f"{name}[")) for file, name in named)

    def may_run_on_gpu(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        return HAS_CUDA and not (callspec and "cpu" in map(str, callspec.params.values()))

    left_out = [
        item
        for item in items
        if not is_named(item)
        and (
            any(map(item.get_closest_marker, ("real", "contracts")))
            or (item.get_closest_marker("exhaustive") and not may_run_on_gpu(item))
        )
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        deselected = set(left_out)
        items[:] = [item for item in items if item not in deselected]


@pytest.fixture(params=["cpu", *on_cuda("cuda")])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["cpu", *on_cuda("cuda walk", "cuda at_once")])
def verifier(request: pytest.FixtureRequest) -> tuple[torch.device, str | None]:
    """Return a device, and one of its plans of verify_tree."""
    device, *plan = request.param.split(" ")
    return torch.device(device), plan[0] if plan else None


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raise on an interrupt, even if the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _fixed_costs() -> Iterator[None]:
    """Start adaptive engines with costs of rounds that depend on no clock; `measured_costs` has them measured."""
    with round_costs.fixed():
        yield


@pytest.fixture(scope="session", autouse=True)
def _tiny_target() -> Iterator[None]:
    """Check the packaged target once, not in each of a thousand engines."""
    with tiny_target.checked_once():
        yield


@pytest.fixture
def measured_costs() -> Iterator[None]:
    with round_costs.measured():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(20)
    np.random.seed(20)
    torch.manual_seed(20)
