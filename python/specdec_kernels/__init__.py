"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from typing import Any

from . import ops
from ._C import cuda_architectures, cuda_version
from ._C import version as __version__
from ._deprecated import deprecated
from .ngram import NgramDraft, NgramIndex, NgramStatistics
from .ops import *  # noqa: F403
from .plans import A100, B200, H100, H200, L40S, AttentionPlan, Gpu, MlaPlan, attention_plan, mla_plan
from .status import Edit, FinishReason, Status

__all__ = [
    "A100",
    "B200",
    "H100",
    "H200",
    "L40S",
    "AttentionPlan",
    "Edit",
    "FinishReason",
    "Gpu",
    "MlaPlan",
    "NgramDraft",
    "NgramIndex",
    "NgramStatistics",
    "Status",
    "__version__",
    "attention_plan",
    "cuda_architectures",
    "cuda_version",
    "mla_plan",
]
__all__ += ops.__all__


def __getattr__(name: str) -> Any:
    """Return what replaced an old name, and warn."""
    return deprecated(name, __name__, globals())
