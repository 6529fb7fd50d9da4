"""What a round reads and writes between rounds, at fixed addresses."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..models.attention import Rows
from ..ops import LogitEdits, PagePool, SlotState, make_logit_edits, make_page_pool, make_slot_state


def to_device(numbers: array[Any], device: torch.device) -> Tensor:
    """int32, or float32, on the device, behind what is on the stream: a pageable copy would wait for all of it."""
    dtype = torch.float32 if numbers.typecode == "f" else torch.int32
    # torch takes no empty buffer.
    tensor = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class EngineState(SlotState):
    """The slots' state, the pages they hold, and how they attend."""

    pool: PagePool
    edits: LogitEdits
    fixed_split: int | None  # of attention
    max_kv_len: int | None  # KV rows that no slot exceeds in the round that is launched; None: outside of one

    @classmethod
    def create(
        cls,
        *,
        num_slots: int,
        vocab_size: int,
        max_len: int,
        max_stop_tokens: int,
        num_pages: int,
        max_pages: int,
        page_size: int,
        fixed_split: int | None,
        device: torch.device,
    ) -> EngineState:
        like = torch.empty(0, device=device)
        state = cls(*make_slot_state(num_slots, max_len, max_stop_tokens, like))
        state.pool = make_page_pool(num_pages, num_slots, max_pages, page_size, like)
        state.edits = make_logit_edits(num_slots, vocab_size, like)
        state.fixed_split = fixed_split
        state.max_kv_len = None
        return state

    def resize_pool(self, num_pages: int) -> None:
        """Another pool, of which every page is free."""
        num_slots, max_pages = self.pool.page_table.shape
        self.pool = make_page_pool(num_pages, num_slots, max_pages, self.pool.page_size, like=self.seq_lens)

    @contextmanager
    def kv_bounded(self, max_kv_len: int) -> Iterator[None]:
        """For the passes of a round, which may have other plans where KV is short."""
        self.max_kv_len = max_kv_len
        try:
            yield
        finally:
            self.max_kv_len = None

    def rows(
        self, slots: Tensor, prefix_lens: Tensor, tail_len: int | None = None, **options: Tensor | int | None
    ) -> Rows:
        """A forward pass of these slots over `prefix_lens` rows and a tail; packed rows are a tail themselves."""
        return Rows(
            slots=slots,
            page_table=self.pool.page_table,
            prefix_lens=prefix_lens,
            tail_len=tail_len,
            status=self.status,
            fixed_split=self.fixed_split,
            max_kv_len=self.max_kv_len,
            **options,  # type: ignore[arg-type]
        )
