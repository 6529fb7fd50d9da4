"""SGLang's speculative kernels: the same names, arguments, shapes, dtypes and in-place results, on CPU and CUDA.

    from specdec_kernels.compat.sglang import verify_tree_greedy  # instead of sgl_kernel's

Invalid data does no harm: a walk ends at a link that does not rise, tokens and rows out of range are neither read nor
written, outputs need no initialization, offsets have 64 bits. Arguments of a wrong shape, dtype or device raise.
Letters: bs requests, D nodes of a tree, S width of a row of accept_index, V vocabulary size. Both devices give the same
integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import _C

if TYPE_CHECKING:
    from ...ops._tensor import Tensor

__all__ = [
    "build_tree_kernel_efficient",
    "move_accept_tokens",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build the links, positions and masks of trees from the selected candidates.

    Candidate c was drafted from the root if c < topk, else from candidate parent_list[c // topk]. A node whose parent
    is not among the nodes before it has no links; it gets the root's position and attends to the root and itself.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1 or more] int64; of any width for depth 1.
        selected_index: [bs, D - 1] int64, the candidate of each node but the root, increasing.
        verified_seq_len: [bs] int64.
        tree_mask: bool or uint8, written. Mode 0 (full): for each request D rows of its verified_seq_len + D columns,
            whose last D are written if they are within the tensor. Mode 1 (tree): [bs * D * D]. Mode 2 (packed, D up to
            32): bits from the lowest, 1, 2 or 4 bytes for each row if D is at most 8, 16, 32.
        positions: [bs * D] int64, written: verified_seq_len plus the node's depth.
        retrive_index: [bs, D] int64, written: flat row of each node.
        retrive_next_token: [bs, D] int64, written: its first child, -1 for none.
        retrive_next_sibling: [bs, D] int64, written: its next sibling, -1 for none.
        topk: branches of each draft step.
        depth: draft steps.
        draft_token_num: D, 1 to 256.
        tree_mask_mode: 0, 1 or 2, see tree_mask.

    Raises:
        ValueError: wrong dtype, shape or device; a size out of range.
    """
    _C.build_tree_kernel_efficient(
        None, parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
        retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
    )  # fmt: skip


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the longest path that follows the target's argmax tokens, and emit the token after it.

    Args:
        predicts: [rows] int32, written at the flat rows of the path only: the token that follows each.
        accept_index: [bs, S] int32, written in its first accept_token_num + 1 columns: flat rows of the path.
        accept_token_num: [bs] int32, written: accepted nodes without the root; at most S - 1.
        candidates: [bs, D] int64, the nodes' tokens; D up to 1024.
        retrive_index: [bs, D] int64, as `build_tree_kernel_efficient` writes it.
        retrive_next_token: [bs, D] int64, from there.
        retrive_next_sibling: [bs, D] int64, from there.
        target_predict: [bs, D] int64, read by flat row.

    Raises:
        ValueError: wrong dtype, shape or device.
    """
    _C.verify_tree_greedy(
        None, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        retrive_next_sibling, target_predict,
    )  # fmt: skip


def move_accept_tokens(
    data_ptrs: Tensor,
    row_bytes: int,
    num_rows: int,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
) -> None:
    """Compact the KV rows of accepted paths in every layer with one kernel.

    It does what SGLang's `move_accept_tokens_to_target_kvcache` does. The row of path entry j,
    out_cache_loc[accept_index[b, j]], is copied to req_to_token[req_pool_indices[b], seq_lens[b] + j], for j up to
    num_correct_drafts[b]. A row that is already in place, or whose source or destination is out of range, is skipped.
    Paths must increase, and requests must not share rows.

    Args:
        data_ptrs: [buffers] int64, addresses of K and V of every layer: row_bytes * num_rows bytes each, on the device
            of the tensors, at multiples of 16.
        row_bytes: bytes of one row of one buffer, a multiple of 16.
        num_rows: rows of each buffer.
        req_to_token: [slots, tokens] int32.
        req_pool_indices: [bs] int64, the slot of each request.
        seq_lens: [bs] int64, without the tree.
        out_cache_loc: [rows] int64, by flat row of the trees.
        accept_index: [bs, S] int32, from `verify_tree_greedy`.
        num_correct_drafts: [bs] int32, without the root.

    Raises:
        ValueError: wrong dtype, shape or device; a size out of range.
    """
    _C.move_accept_tokens(
        None, data_ptrs, row_bytes, num_rows, req_to_token, req_pool_indices, seq_lens, out_cache_loc, accept_index,
        num_correct_drafts,
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a path by sampling: a child is accepted if the coin is below the probabilities summed up to it.

    The next token is drawn from the target's residual at the last node: its probabilities minus `draft_probs`, or all
    of them if the path has the full width. With both thresholds at 1 the text is distributed as the target's.

    Args:
        predicts: as for `verify_tree_greedy`, like all arguments up to retrive_next_sibling.
        accept_index: [bs, S] int32, written.
        accept_token_num: [bs] int32, written.
        candidates: [bs, D] int64.
        retrive_index: [bs, D] int64.
        retrive_next_token: [bs, D] int64.
        retrive_next_sibling: [bs, D] int64.
        uniform_samples: [bs, D] float32, the coin of each node's children.
        uniform_samples_for_final_sampling: [bs] float32, the coin of the next token.
        target_probs: [bs, D, V] float32; an invalid probability counts as 0. V is at most 2^22.
        draft_probs: [bs, D, V] float32, zeros; written: the target's probability of each rejected token.
        threshold_single: a child with at least this probability is accepted whatever the coin.
        threshold_acc: divisor of the children's sum before it is compared with the coin.
        deterministic: ignored; the same arguments always give the same result.

    Raises:
        ValueError: wrong dtype, shape or device; a threshold outside 0 to 1.
    """
    _C.tree_speculative_sampling_target_only(
        None, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs,
        threshold_single, threshold_acc,
    )  # fmt: skip
