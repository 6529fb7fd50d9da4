"""What every test shares: the device fixture, seeded randomness, tolerances, poison."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specdec_kernels

HAS_CUDA = torch.cuda.is_available() and specdec_kernels.cuda_version is not None

# Largest error of an op's float output against float64, relative to the output's scale. The op computes in float32
# and rounds once to the output dtype (unit roundoff 2^-24, 2^-11, 2^-8), so a few units cover the sums inside.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def on_cuda(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.skipif(not HAS_CUDA, reason="no GPU here"))


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
