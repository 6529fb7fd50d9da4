"""What every test shares: the device fixture, seeded randomness, tolerances, poison."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels

HAS_CUDA = torch.cuda.is_available() and specdec_kernels.cuda_version is not None

# Largest error of an op's float output against float64, relative to the output's scale. The op computes in float32
# and rounds once to the output dtype (unit roundoff 2^-24, 2^-11, 2^-8), so a few units cover the sums inside.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="no GPU here"))])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)
