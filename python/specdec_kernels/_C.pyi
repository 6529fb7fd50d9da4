"""The compiled module. `ops.py` documents the arguments; the order here is the order there, `stream` first."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

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

# --- scheduler
class Executor(Protocol):
    """What the scheduler drives: csrc/scheduler/executor.h says when each call comes, scheduler.h what a raise does."""

    def begin(self, slot: int, request_id: int, text: list[int]) -> None: ...
    def prefill(self, slot: int, tokens: list[int], start: int, is_last: bool) -> None: ...
    def activate(
        self, slot: int, request_id: int, seq_len: int, root: int, remaining: int, stop_tokens: list[int]
    ) -> None: ...
    def round(self, slots: list[int]) -> None: ...
    def deactivate(self, slot: int, request_id: int) -> None: ...
    def emit(
        self,
        request_id: int,
        tokens: list[int],
        finish_reason: int,
        rounds: int,
        drafted: int,
        accepted: int,
        status: int,
    ) -> None: ...

class Scheduler:
    """Continuous batching in C++. The arrays are contiguous int32 on the CPU; `executor.round` fills them."""

    def __init__(
        self,
        executor: Executor,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_len: int,
        reserve: int,
        accept_width: int,
        prefill_chunk: int,
        max_batch: int | None = None,
        out_tokens: Tensor,
        out_len: Tensor,
        finish_reasons: Tensor,
        status: Tensor,
        num_nodes: Tensor,
    ) -> None: ...
    def submit(
        self, prompt: Sequence[int] | Tensor, max_new_tokens: int, stop_tokens: Sequence[int] | Tensor = ()
    ) -> int: ...
    def cancel(self, request_id: int) -> bool: ...
    def abort_all(self) -> None: ...
    def step(self) -> bool: ...
    def run_until_idle(self) -> None: ...
    def wait_for_work(self, timeout: float) -> bool: ...
    def drain(self, timeout: float) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_pages_estimate(self) -> int: ...
    @property
    def num_retractions(self) -> int: ...

# --- boundary timing
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
