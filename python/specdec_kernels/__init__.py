"""Speculative decoding as a library: CUDA kernels, a CPU twin of each, and the engine that drives them.

The ops take any tensor with DLPack (torch, NumPy, CuPy, JAX); importing this package imports none of those.
"""

from ._C import cuda_architectures, cuda_version
from ._C import version as __version__
from .draft_size import RoundCosts, choose_num_nodes
from .ngram import NgramIndex, NgramStatistics
from .ops import (
    Accepted,
    Candidates,
    DraftInputs,
    Frontier,
    PagePool,
    TokenScores,
    Tree,
    alloc_pages,
    build_tree,
    build_tree_from_mask,
    build_tree_from_parents,
    commit_tokens,
    copy_kv,
    expand_root,
    expand_tree,
    fork_pages,
    free_pages,
    make_page_pool,
    merge_trees,
    move_kv,
    sample_draft,
    score_tokens,
    select_topk,
    tree_attention,
    tree_attention_workspace,
    verify_tree,
    write_kv,
)
from .status import FinishReason, Status

__all__ = [
    "Accepted",
    "Candidates",
    "DraftInputs",
    "FinishReason",
    "Frontier",
    "NgramIndex",
    "NgramStatistics",
    "PagePool",
    "RoundCosts",
    "Status",
    "TokenScores",
    "Tree",
    "__version__",
    "alloc_pages",
    "build_tree",
    "build_tree_from_mask",
    "build_tree_from_parents",
    "choose_num_nodes",
    "commit_tokens",
    "copy_kv",
    "cuda_architectures",
    "cuda_version",
    "expand_root",
    "expand_tree",
    "fork_pages",
    "free_pages",
    "make_page_pool",
    "merge_trees",
    "move_kv",
    "sample_draft",
    "score_tokens",
    "select_topk",
    "tree_attention",
    "tree_attention_workspace",
    "verify_tree",
    "write_kv",
]
