"""Sampling parameters, as benchmarks give them to other packages' kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, the same for all requests."""

    temperature: float
    top_k: int = 0  # 0: off
    top_p: float = 1.0
