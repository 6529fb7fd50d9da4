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
def tree_attention(
    stream: int | None,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    slots: Tensor | None,
    q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_len: int | None,
    mask: Tensor | None,
    scale: float | None,
    out: Tensor,
    lse: Tensor | None,
    status: Tensor | None,
) -> None: ...

# --- verify

# --- kv

# --- ngram

# --- scheduler

# --- boundary timing
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
