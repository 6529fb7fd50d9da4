"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from importlib.metadata import version as _version

from ._C import cuda_architectures, cuda_version
from .ops import Accepted, Tree, commit_tokens, select_topk, verify_tree
from .status import FinishReason, Status

__version__ = _version("specdec-kernels")
__all__ = [
    "Accepted",
    "FinishReason",
    "Status",
    "Tree",
    "__version__",
    "commit_tokens",
    "cuda_architectures",
    "cuda_version",
    "select_topk",
    "verify_tree",
]
