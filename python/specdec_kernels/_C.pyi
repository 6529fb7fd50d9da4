"""The compiled module. `ops.py` documents the arguments; the order here is the order there, `stream` first."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any

cuda_version: str | None
cuda_architectures: str | None

# --- draft
def select_topk(
    stream: int | None, logits: Tensor, id_map: Tensor | None, out_ids: Tensor, out_logprobs: Tensor
) -> None: ...

# --- tree

# --- attention

# --- verify
def verify_tree(
    stream: int | None,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    accept_width: int,
    slots: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor | None,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    status: Tensor | None,
    out_tokens: Tensor,
    out_len: Tensor,
    out_path: Tensor,
) -> None: ...
def commit_tokens(
    stream: int | None,
    out_tokens: Tensor,
    out_len: Tensor,
    stop_tokens: Tensor,
    remaining: Tensor,
    max_lens: Tensor,
    seq_lens: Tensor,
    seq_lens_before: Tensor,
    root_tokens: Tensor,
    finish_reasons: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
    out_num_valid: Tensor,
) -> None: ...

# --- kv
def alloc_pages(
    stream: int | None,
    page_table: Tensor,
    page_counts: Tensor,
    page_refs: Tensor,
    free_stack: Tensor,
    num_free: Tensor,
    page_size: int,
    lens: Tensor,
    reserve: int,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def free_pages(
    stream: int | None,
    page_table: Tensor,
    page_counts: Tensor,
    page_refs: Tensor,
    free_stack: Tensor,
    num_free: Tensor,
    page_size: int,
    keep_lens: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def write_kv(
    stream: int | None,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start_lens: Tensor,
    row_offset: int,
    slots: Tensor | None,
    num_valid: Tensor | None,
    cu_seqlens_q: Tensor | None,
    page_refs: Tensor | None,
    status: Tensor | None,
) -> None: ...
def move_kv(
    stream: int | None,
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    path: Tensor,
    num_valid: Tensor,
    seq_lens_before: Tensor,
    slots: Tensor | None,
    page_refs: Tensor | None,
    status: Tensor | None,
) -> None: ...

# --- ngram

# --- scheduler

# --- boundary timing
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
