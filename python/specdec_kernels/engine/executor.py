"""What the C++ scheduler calls: slots begin, prefill, run rounds and end here. Results go back through a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import alloc_pages
from .round import Round

if TYPE_CHECKING:
    from .._C import Emission

Emit = Callable[[Sequence["Emission"]], None]


class Executor:
    """Turns the scheduler's decisions into device work, which no call but `progress` waits for.

    All calls come from the thread that runs the scheduler, on the stream of the rounds.
    """

    def __init__(self, round: Round, emit: Emit) -> None:
        self.round, self.emit = round, emit
        self.target, self.draft, self.state = round.target, round.draft, round.state
        self.launch = round.launch
        self.groups: dict[int, int] = {}  # of the n-gram index, by request; none: 0
        self._texts: dict[int, Tensor] = {}  # per slot in prefill
        self._slots = torch.arange(len(self.state.seq_lens), dtype=torch.int32, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self.state.seq_lens.device

    @torch.inference_mode()
    def begin(self, slot: int, request_id: int, text: list[int]) -> None:
        state, slots = self.state, self._slots[slot : slot + 1]
        self._texts[slot] = self._to_device(text)
        # All pages up to the first round at once, as the scheduler counts them. Should there be too few, the slot is
        # stalled, which its activation turns into an error.
        alloc_pages(state.pool, state.seq_lens, len(text) - 1 + self.round.reserve, slots=slots, status=state.status)
        self.draft.begin(slot, request_id, self.groups.get(request_id, 0), self._texts[slot])

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: list[int], start: int, is_last: bool) -> None:
        state, text, end = self.state, self._texts[slot], start + len(tokens)
        slots = self._slots[slot : slot + 1]
        chunk = text[None, start:end]
        positions = torch.arange(start, end, dtype=torch.int32, device=self._device)[None]
        self.target.forward(chunk, positions, state.rows(slots, state.seq_lens, tail_len=len(tokens)))
        self.draft.prefill(slots, chunk, text[None, start + 1 : end + 1], positions, self.target.features())
        state.seq_lens[slot] = end

    @torch.inference_mode()
    def activate(self, slot: int) -> None:
        del self._texts[slot]
        self.draft.activate(self._slots[slot : slot + 1])

    @torch.inference_mode()
    def deactivate(self, slot: int, request_id: int) -> None:
        self._texts.pop(slot, None)
        self.draft.release(slot)

    def progress(self) -> tuple[int, int]:
        return int(self.round.rings.num_applied), int(self.round.rings.num_published)

    def _to_device(self, text: list[int]) -> Tensor:
        tokens = torch.tensor(text, dtype=torch.int32)
        if self._device.type == "cpu":
            return tokens
        return tokens.pin_memory().to(self._device, non_blocking=True)  # a pageable copy would wait for the rounds
