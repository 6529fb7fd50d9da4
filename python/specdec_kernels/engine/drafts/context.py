"""The view of an engine that its drafts have: protocols, which the engine's state and prefill passes satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...models.language_model import LanguageModel
from ...models.layers.paged_batch import PagedBatch
from ...ops import PagePool


class DraftState(Protocol):
    """The engine's tensors of all slots that drafts read, at fixed addresses; drafts never write them.

    `seq_lens` are committed rows, `prefix_lens` those before the last committed round, `root_tokens` the tokens after
    the committed rows. A slot with `max_nodes` 1 wants no drafts.
    """

    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def prefix_lens(self) -> Tensor: ...
    @property
    def root_tokens(self) -> Tensor: ...
    @property
    def max_nodes(self) -> Tensor: ...
    @property
    def finish_reasons(self) -> Tensor: ...
    @property
    def status(self) -> Tensor: ...
    @property
    def temperature(self) -> Tensor: ...
    @property
    def seeds(self) -> Tensor: ...
    @property
    def pool(self) -> PagePool: ...
    @property
    def fixed_split(self) -> int | None: ...
    @property
    def window_pages(self) -> Mapping[int, int]: ...

    def rows(
        self,
        slots: Tensor,
        prefix_lens: Tensor,
        tail_len: int | None = None,
        *,
        max_kv_len: int | None = None,
        **options: Tensor | int | None,
    ) -> PagedBatch:
        """Return the batch of a forward pass of `slots` over a prefix and a tail; packed rows are the tail."""


class PrefillRows(Protocol):
    """Rows of prompts that the target has just run: P pieces of Q neighboring rows each."""

    @property
    def tokens(self) -> Tensor: ...  # [P, Q] int32
    @property
    def next_tokens(self) -> Tensor: ...  # [P, Q] int32: the successor of each; of a prompt's last row, itself
    @property
    def positions(self) -> Tensor: ...  # [P, Q] int32
    @property
    def rows(self) -> PagedBatch: ...  # a piece is a request of this batch, with a prefix of its own


@dataclass(frozen=True)
class DraftContext:
    """The engine that opens a draft, as the draft sees it.

    Attributes:
        target: the model it drafts for, loaded.
        state: the slots' tensors, which keep their addresses.
        max_len: longest sequence, prompt included.
        catches_up: drafts that were idle resume after `catch_up`; if False, a slot whose draft is idle stays so.
        tokenizer: the target's; None where it has none.
        no_tokenizer: why there is none.
        calibrates: whether drafts learn from acceptance how likely their candidates are.
    """

    target: LanguageModel
    state: DraftState
    max_len: int
    catches_up: bool
    tokenizer: Any
    no_tokenizer: str
    calibrates: bool = True

    @property
    def device(self) -> torch.device:
        device: torch.device = self.state.seq_lens.device
        return device

    @property
    def num_slots(self) -> int:
        return len(self.state.seq_lens)

    @property
    def num_pages(self) -> int:
        return len(self.state.pool.free_stack)

    @property
    def page_size(self) -> int:
        return self.state.pool.page_size

    @property
    def vocab_size(self) -> int:
        size: int = self.target.config.vocab_size
        return size

    @property
    def batch_invariant(self) -> bool:
        """Whether what is computed for a request must not depend on its batch-mates."""
        return self.state.fixed_split is not None
