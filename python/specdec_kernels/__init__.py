"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from importlib.metadata import version as _version

from ._C import cuda_architectures, cuda_version
from .ngram import NgramIndex, NgramStatistics
from .ops import (
    Candidates,
    DraftInputs,
    Frontier,
    Tree,
    build_tree,
    build_tree_from_mask,
    build_tree_from_parents,
    expand_root,
    expand_tree,
    select_topk,
    tree_attention,
)

__version__ = _version("specdec-kernels")
__all__ = [
    "Candidates",
    "DraftInputs",
    "Frontier",
    "NgramIndex",
    "NgramStatistics",
    "Tree",
    "__version__",
    "build_tree",
    "build_tree_from_mask",
    "build_tree_from_parents",
    "cuda_architectures",
    "cuda_version",
    "expand_root",
    "expand_tree",
    "select_topk",
    "tree_attention",
]
