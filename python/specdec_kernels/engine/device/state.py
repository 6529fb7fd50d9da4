"""The slots' state between rounds, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ...models.kv_pools import pages_of
from ...models.layers.paged_batch import PagedBatch
from ...ops import (
    LogitEdits,
    PagePool,
    SlotState,
    alloc_pages,
    free_pages,
    make_logit_edits,
    make_page_pool,
    make_slot_state,
)


class EngineState(SlotState):
    """The slots' state, the pages they hold, and how they attend.

    Pages that have left the windows of all layers of a page table are freed as a text grows: before a round, and after
    each chunk of a prompt. A table without a window gets a prompt's pages at once, one with a window chunk by chunk.
    """

    pool: PagePool  # of all layers whose window has no table of its own
    all_pages: PagePool  # `pool`, with table rows after the slots' for the pages of the prefix cache
    window: int | None  # widest of these layers; None: one of them sees all rows
    window_pools: dict[int, PagePool]  # of layers with these windows
    window_pages: Mapping[int, int]  # most pages of these
    edits: LogitEdits
    last_hidden: Tensor  # [num_slots, H], of the last prefilled row; of a whole prompt, the root's
    last_features: Tensor  # [num_slots, F], of the same row, as drafts ask for them
    fixed_split: int | None  # of attention
    no_rows: Tensor  # [num_slots] of zeros

    @classmethod
    def create(
        cls,
        *,
        num_slots: int,
        vocab_size: int,
        hidden_size: int,
        num_features: int = 0,
        dtype: torch.dtype,
        max_len: int,
        max_stop_tokens: int,
        num_pages: int,
        max_pages: int,
        page_size: int,
        prefix_cache: bool = False,
        fixed_split: int | None,
        device: torch.device,
        window: int | None = None,
        window_pages: Mapping[int, int] = MappingProxyType({}),
    ) -> EngineState:
        like = torch.empty(0, device=device)
        state = cls(*make_slot_state(num_slots, max_len, max_stop_tokens, like))
        state.window, state.window_pages = window, window_pages
        state._make_pools(num_pages, max_pages, page_size, prefix_cache)
        state.no_rows = torch.zeros_like(state.seq_lens)
        state.edits = make_logit_edits(num_slots, vocab_size, like)
        state.last_hidden = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        state.last_features = torch.zeros(num_slots, num_features, dtype=dtype, device=device)
        state.fixed_split = fixed_split
        return state

    def resize_pool(self, num_pages: int) -> None:
        """Replace the pools by others with free pages alone."""
        max_pages, page_size = self.pool.page_table.shape[1], self.pool.page_size
        self._make_pools(num_pages, max_pages, page_size, len(self.all_pages.page_counts) > len(self.seq_lens))

    def _make_pools(self, num_pages: int, max_pages: int, page_size: int, prefix_cache: bool) -> None:
        num_slots = len(self.seq_lens)
        sizes = num_slots, max_pages, page_size
        num_rows = num_slots + (-(-num_pages // max_pages) if prefix_cache else 0)
        self.all_pages = make_page_pool(num_pages, num_rows, max_pages, page_size, like=self.seq_lens)
        of_slots = "page_table", "page_counts", "page_starts"
        self.pool = self.all_pages._replace(**{name: getattr(self.all_pages, name)[:num_slots] for name in of_slots})
        self.window_pools = {
            window: make_page_pool(pages_of(window, num_pages, self.window_pages), *sizes, like=self.seq_lens)
            for window in self.window_pages
        }

    def sliding(self) -> list[tuple[int, PagePool]]:
        """Return the pools that free pages outside a window, each with its window."""
        own = [] if self.window is None else [(self.window, self.pool)]
        return [*self.window_pools.items(), *own]

    def make_room(self, slots: Tensor, reserve: int) -> None:
        """Free the pages that left their windows, and allocate pages for `reserve` rows after the text of these slots.

        A slot that gets none of `pool` is stalled. The window pools suffice whenever `pool` does, since they need no
        more pages.
        """
        self.free_behind(slots)
        for pool in self.window_pools.values():
            alloc_pages(pool, self.seq_lens, reserve, slots=slots)
        alloc_pages(self.pool, self.seq_lens, reserve, slots=slots, status=self.status)

    def make_room_for_chunks(self, slots: Tensor, ends: Tensor) -> None:
        """Allocate the pages that these slots [R] need for the first `ends` rows of their prompts, from window pools.

        Other pools gave them when the request began. A shortage shows when the rows are written.
        """
        if not self.sliding():
            return
        lens = self.seq_lens.clone()
        lens[slots] = ends
        for _, pool in self.sliding():
            alloc_pages(pool, lens, 0, slots=slots)

    def free_behind(self, slots: Tensor) -> None:
        """Free the pages of these slots that have left the window of every layer."""
        for window, pool in self.sliding():
            free_pages(pool, self.seq_lens, window=window, slots=slots, status=self.status)

    def give_back(self, slots: Tensor) -> None:
        """Free all pages of these slots."""
        for pool in (*self.window_pools.values(), self.pool):
            free_pages(pool, self.no_rows, slots=slots, status=self.status)

    def rows(
        self,
        slots: Tensor,
        prefix_lens: Tensor,
        tail_len: int | None = None,
        *,
        max_kv_len: int | None = None,
        **options: Tensor | int | None,
    ) -> PagedBatch:
        """Return the batch of a forward pass of `slots` over `prefix_lens` rows and a tail; packed rows are the tail.

        `max_kv_len`: KV rows that no slot exceeds, by which attention chooses its plan; None: what a page table holds.
        """
        return PagedBatch(
            slots=slots,
            page_table=self.pool.page_table,
            window_tables={window: pool.page_table for window, pool in self.window_pools.items()},
            prefix_lens=prefix_lens,
            tail_len=tail_len,
            status=self.status,
            fixed_split=self.fixed_split,
            max_kv_len=max_kv_len,
            **options,  # type: ignore[arg-type]
        )
