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

# --- kv

# --- ngram
class NgramIndex:
    def __init__(self, max_tokens: int, num_slots: int, max_len: int) -> None: ...
    def insert(self, tokens: Tensor, slot: int | None) -> None: ...
    def release(self, slot: int) -> None: ...
    def draft(
        self,
        slots: Tensor | None,
        seq_lens: Tensor,
        num_draft_tokens: int,
        chain: bool,
        min_prob: float,
        min_match: int,
        out_tokens: Tensor,
        out_parents: Tensor,
        out_positions: Tensor,
        out_first_child: Tensor,
        out_next_sibling: Tensor,
        out_mask: Tensor,
        out_num_nodes: Tensor,
        out_scores: Tensor,
        out_match_len: Tensor,
    ) -> None: ...
    def clear(self) -> None: ...
    def statistics(self) -> tuple[int, int, int, int, int, int]: ...
    def digest(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

# --- scheduler

# --- boundary timing
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
