"""The compiled module. `ops.py` documents the arguments; the order here is the order there, `stream` first."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any

cuda_version: str | None
cuda_architectures: str | None

# --- draft
def select_topk(
    stream: int | None, logits: Tensor, k: int, id_map: Tensor | None, out_ids: Tensor, out_logprobs: Tensor
) -> None: ...

# --- tree

# --- attention

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
