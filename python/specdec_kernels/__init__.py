"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from importlib.metadata import version as _version

from ._C import cuda_architectures, cuda_version
from .ngram import NgramIndex, NgramStatistics
from .ops import Tree, select_topk

__version__ = _version("specdec-kernels")
__all__ = [
    "NgramIndex",
    "NgramStatistics",
    "Tree",
    "__version__",
    "cuda_architectures",
    "cuda_version",
    "select_topk",
]
