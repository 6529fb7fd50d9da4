"""Whether there is a GPU, parameters for it, and tolerances by dtype."""

from __future__ import annotations

import torch

import specdec_kernels

HAS_CUDA = torch.cuda.is_available() and specdec_kernels.cuda_version is not None

# Largest error of an op's float output against float64, relative to the output's scale. The op computes in float32
# and rounds once to the output dtype (unit roundoff 2^-24, 2^-11, 2^-8), so a few units cover the sums inside.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def on_cuda(*names: str) -> tuple[str, ...]:
    """Return parameters of tests that need a GPU: none where there is none, which saves collecting thousands of skips."""
    return names if HAS_CUDA else ()
