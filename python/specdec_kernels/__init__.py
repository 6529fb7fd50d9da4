"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from importlib.metadata import version as _version

from ._C import cuda_architectures, cuda_version
from .ops import (
    Accepted,
    PagePool,
    Tree,
    alloc_pages,
    commit_tokens,
    free_pages,
    make_page_pool,
    move_kv,
    select_topk,
    verify_tree,
    write_kv,
)
from .status import FinishReason, Status

__version__ = _version("specdec-kernels")
__all__ = [
    "Accepted",
    "FinishReason",
    "PagePool",
    "Status",
    "Tree",
    "__version__",
    "alloc_pages",
    "commit_tokens",
    "cuda_architectures",
    "cuda_version",
    "free_pages",
    "make_page_pool",
    "move_kv",
    "select_topk",
    "verify_tree",
    "write_kv",
]
