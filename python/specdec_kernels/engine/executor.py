"""What the C++ scheduler calls: slots begin, prefill, run rounds and end here. Results go back through a ring."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..ops import alloc_pages
from .passes import Passes
from .prefill import Chunk
from .round import Round
from .state import to_device

if TYPE_CHECKING:
    from .._C import Emission

Emit = Callable[[Sequence["Emission"]], None]


class Executor:
    """Turns the scheduler's decisions into device work, which no call but `progress` waits for.

    All calls come from the thread that runs the scheduler, on the stream of the rounds.
    """

    def __init__(self, round: Round, emit: Emit) -> None:
        self.round, self.emit = round, emit
        self.passes = Passes(round.target, round.draft, round.state)
        self.target, self.draft, self.state = round.target, round.draft, round.state
        self.launch = round.launch
        self.groups: dict[int, int] = {}  # of the n-gram index, by request; none: 0
        device = self.state.seq_lens.device
        self._slots = torch.arange(len(self.state.seq_lens), dtype=torch.int32, device=device)

    @torch.inference_mode()
    def begin(self, slot: int, request_id: int, text: list[int]) -> None:
        state, slots = self.state, self._slots[slot : slot + 1]
        # All pages up to the first round at once, as the scheduler counts them. Should there be too few, the slot is
        # stalled, which its activation turns into an error.
        alloc_pages(state.pool, state.seq_lens, len(text) - 1 + self.round.reserve, slots=slots, status=state.status)
        self.draft.begin(slot, request_id, self.groups.get(request_id, 0), text)

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> None:
        self.passes.run(chunks)

    @torch.inference_mode()
    def activate(self, slots: list[int]) -> None:
        self.draft.activate(to_device(array("i", slots), self.state.seq_lens.device))

    def deactivate(self, slots: list[int]) -> None:
        for slot in slots:
            self.draft.release(slot)

    def progress(self) -> tuple[int, int]:
        return int(self.round.rings.num_applied), int(self.round.rings.num_published)
