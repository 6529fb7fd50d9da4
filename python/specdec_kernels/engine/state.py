"""Device state of the slots: everything a round reads and writes between rounds, at fixed addresses."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.attention import Rows
from ..ops import PagePool, make_page_pool


def to_device(numbers: array[int], device: torch.device) -> Tensor:
    """int32 on the device, behind what is on the stream: a pageable copy would wait for the rounds in flight."""
    tensor = torch.frombuffer(numbers, dtype=torch.int32)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class SlotState:
    """Per-slot tensors, int32 unless said.

    `seq_lens` is L: rows 0..L-1 are committed, the root is the token at position L.
    """

    seq_lens: Tensor
    seq_lens_before: Tensor
    root_tokens: Tensor
    remaining: Tensor
    max_lens: Tensor
    stop_tokens: Tensor  # [num_slots, max_stop_tokens], padded with -1
    temperature: Tensor  # float32; with 0, greedy, the other four mean nothing
    top_k: Tensor
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64
    stops_from: Tensor  # first position where a stop token may stand
    num_logprobs: Tensor  # best entries to score beside each token; -1: score nothing
    finish_reasons: Tensor
    status: Tensor
    pool: PagePool
    fixed_split: int | None  # of attention

    @classmethod
    def create(
        cls,
        *,
        num_slots: int,
        max_len: int,
        max_stop_tokens: int,
        num_pages: int,
        max_pages: int,
        page_size: int,
        fixed_split: int | None,
        device: torch.device,
    ) -> SlotState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            seq_lens=zeros(num_slots),
            seq_lens_before=zeros(num_slots),
            root_tokens=zeros(num_slots),
            remaining=zeros(num_slots),
            max_lens=zeros(num_slots) + max_len,
            stop_tokens=zeros(num_slots, max_stop_tokens) - 1,
            temperature=zeros(num_slots, dtype=torch.float32),
            top_k=zeros(num_slots),
            top_p=zeros(num_slots, dtype=torch.float32),
            min_p=zeros(num_slots, dtype=torch.float32),
            seeds=zeros(num_slots, dtype=torch.int64),
            stops_from=zeros(num_slots),
            num_logprobs=zeros(num_slots) - 1,
            finish_reasons=zeros(num_slots),
            status=zeros(num_slots),
            pool=make_page_pool(num_pages, num_slots, max_pages, page_size, like=zeros(0)),
            fixed_split=fixed_split,
        )

    def resize_pool(self, num_pages: int) -> None:
        """Another pool, of which every page is free."""
        num_slots, max_pages = self.pool.page_table.shape
        self.pool = make_page_pool(num_pages, num_slots, max_pages, self.pool.page_size, like=self.seq_lens)

    def rows(self, slots: Tensor, prefix_lens: Tensor, tail_len: int, **options: Tensor | int | None) -> Rows:
        """A forward pass of these slots over `prefix_lens` rows and a tail."""
        return Rows(
            slots=slots,
            page_table=self.pool.page_table,
            prefix_lens=prefix_lens,
            tail_len=tail_len,
            status=self.status,
            fixed_split=self.fixed_split,
            **options,  # type: ignore[arg-type]
        )


@dataclass
class Rings:
    """How host and device talk (csrc/round/records.h): records in memory that both reach, counted on the device."""

    commands: Tensor  # [depth, words], on the host
    results: Tensor  # [depth, words], on the host
    num_applied: Tensor  # [1] int64
    num_published: Tensor  # [1] int64
    started_at: Tensor  # [1] int64
    slots: Tensor  # [max_batch]: of the round
    given_back: Tensor  # [num_slots]: whose pages are freed before it
    top_n: int  # most best entries scored beside a token

    @classmethod
    def create(cls, state: SlotState, *, max_batch: int, accept_width: int, top_n: int, depth: int) -> Rings:
        num_slots, max_stops = state.stop_tokens.shape
        device = state.stop_tokens.device

        def shared(words: int) -> Tensor:
            return torch.empty(depth, words, dtype=torch.int32, pin_memory=device.type == "cuda")

        def counter() -> Tensor:
            return torch.zeros(1, dtype=torch.int64, device=device)

        rings = cls(
            commands=shared(2 + max_batch + num_slots * (13 + max_stops)),
            results=shared(8 + max_batch * (4 + accept_width * (3 + 2 * top_n) + accept_width % 2)),
            num_applied=counter(),
            num_published=counter(),
            started_at=counter(),
            slots=torch.full((max_batch,), -1, dtype=torch.int32, device=device),
            given_back=torch.full((num_slots,), -1, dtype=torch.int32, device=device),
            top_n=top_n,
        )
        rings.reset()
        return rings

    def reset(self) -> None:
        """As if no round had been: records that do nothing, results that nobody published."""
        self.commands.fill_(-1)
        self.results.zero_()
        self.num_applied.zero_()
        self.num_published.zero_()
