"""The ops: one thin function each, which allocates missing outputs and calls the compiled op.

Conventions:
    Shapes are row-major and contiguous unless said; indices are int32. All tensors of a call are on one device, where
    the op runs without synchronizing. With preallocated outputs an op is legal inside a CUDA graph. Inputs are never
    converted or copied: a wrong dtype, shape, device or stride is a ValueError that names the argument, a struct of the
    wrong type a TypeError. `requires_grad` is ignored, but `tree_attention` refuses it while gradients are recorded.

Letters:
    B batch, N tree nodes, S accept width, k topk, V vocabulary, W mask words (ceil(N / 64)).

Common arguments:
    slots: [B] int32, the slot that each row works for, -1 for an empty row. None: row b is slot b.
    out: preallocated results, of the type that the op returns. None allocates them.
    stream: a CUDA stream as an integer (`torch.cuda.Stream.cuda_stream`). None: the caller's current stream.
    status: [num_slots] int32, bits of `Status`. An op sets bits and clears none, unless said.
    seq_lens: [num_slots] int32, L: the committed tokens of a slot.
    prefix_lens: [num_slots] int32, the KV rows before those of the call: L now, or L before the round.
    num_valid: [B] int32, the valid entries of each row.
    paths: `PendingPaths` of the model, for recurrent layers.
"""

from __future__ import annotations

from typing import Any

from .._deprecated import deprecated
from .attention import tree_attention, tree_attention_plan, tree_attention_workspace
from .draft import (
    Calibration,
    DraftExtendInputs,
    DraftInputs,
    Frontier,
    TopK,
    append_draft_backlog,
    draft_extend_inputs,
    expand_root,
    expand_tree,
    expand_trellis,
    make_calibration,
    sample_draft,
    select_topk,
    update_calibration,
)
from .kv import (
    PagePool,
    alloc_pages,
    assign_pages,
    copy_kv,
    fork_pages,
    free_pages,
    make_page_pool,
    move_kv,
    page_table_of_lists,
    write_kv,
)
from .layers import (
    Routing,
    add_rms_norm,
    dequantize,
    gated_rms_norm,
    moe_combine,
    moe_grouped_gemm,
    moe_route,
    quantize_fp8,
    rms_norm_concat,
    rope_qkv_write_kv,
    silu_and_mul,
    small_m_bmm,
    small_m_gemm,
)
from .mla import (
    mla_tree_attention,
    mla_tree_attention_plan,
    mla_tree_attention_workspace,
    rope_heads,
    write_latent,
)
from .recurrent import (
    RecurrentRecords,
    commit_conv1d,
    commit_recurrence,
    compute_gates,
    set_pending_paths,
    tree_conv1d,
    tree_recurrence,
)
from .structs import Accepted, Candidates, PendingPaths, Tree
from .tree import (
    NodeAllocation,
    PackedNodes,
    allocate_nodes,
    build_tree,
    build_tree_from_mask,
    build_tree_from_parents,
    merge_trees,
    pack_mask,
    pack_trees,
    pack_whole_trees,
)
from .verify import (
    LogitEdits,
    SlotState,
    TokenScores,
    commit_tokens,
    edit_logits,
    make_logit_edits,
    make_slot_state,
    mask_stops,
    score_tokens,
    verify_tree,
    verify_tree_workspace,
)

__all__ = [
    "Accepted",
    "Calibration",
    "Candidates",
    "DraftExtendInputs",
    "DraftInputs",
    "Frontier",
    "LogitEdits",
    "NodeAllocation",
    "PackedNodes",
    "PagePool",
    "PendingPaths",
    "RecurrentRecords",
    "Routing",
    "SlotState",
    "TokenScores",
    "TopK",
    "Tree",
    "add_rms_norm",
    "alloc_pages",
    "allocate_nodes",
    "append_draft_backlog",
    "assign_pages",
    "build_tree",
    "build_tree_from_mask",
    "build_tree_from_parents",
    "commit_conv1d",
    "commit_recurrence",
    "commit_tokens",
    "compute_gates",
    "copy_kv",
    "dequantize",
    "draft_extend_inputs",
    "edit_logits",
    "expand_root",
    "expand_tree",
    "expand_trellis",
    "fork_pages",
    "free_pages",
    "gated_rms_norm",
    "make_calibration",
    "make_logit_edits",
    "make_page_pool",
    "make_slot_state",
    "mask_stops",
    "merge_trees",
    "mla_tree_attention",
    "mla_tree_attention_plan",
    "mla_tree_attention_workspace",
    "moe_combine",
    "moe_grouped_gemm",
    "moe_route",
    "move_kv",
    "pack_mask",
    "pack_trees",
    "pack_whole_trees",
    "page_table_of_lists",
    "quantize_fp8",
    "rms_norm_concat",
    "rope_heads",
    "rope_qkv_write_kv",
    "sample_draft",
    "score_tokens",
    "select_topk",
    "set_pending_paths",
    "silu_and_mul",
    "small_m_bmm",
    "small_m_gemm",
    "tree_attention",
    "tree_attention_plan",
    "tree_attention_workspace",
    "tree_conv1d",
    "tree_recurrence",
    "update_calibration",
    "verify_tree",
    "verify_tree_workspace",
    "write_kv",
    "write_latent",
]


def __getattr__(name: str) -> Any:
    """Return what replaced an old name, and warn."""
    return deprecated(name, __name__, globals())
