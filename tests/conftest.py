"""What every test shares: the device fixture, seeded randomness, tolerances, poison."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from support.devices import on_cuda


@pytest.fixture(params=["cpu", on_cuda("cuda")])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["cpu", on_cuda("cuda walk"), on_cuda("cuda at_once")])
def verifier(request: pytest.FixtureRequest) -> tuple[torch.device, str | None]:
    """A device, and one of its plans of verify_tree."""
    device, *plan = request.param.split(" ")
    return torch.device(device), plan[0] if plan else None


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """An interrupt raises, also where the tests were started in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)
