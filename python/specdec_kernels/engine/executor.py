"""What the C++ scheduler calls: slots begin, prefill, run rounds and end here; results go back in host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM
from ..ops import alloc_pages, free_pages
from ..status import Status
from .drafts import Draft
from .params import SamplingParams
from .round import Round
from .state import SlotState

Emit = Callable[[int, list[int], int, int, int, int, int], None]


class Executor:
    """Turns the scheduler's decisions into device work. All calls come from the thread that runs the scheduler.

    The host arrays hold the last round's results, row i for the i-th slot of that round: `out_tokens` [B, S],
    `out_len`, `finish_reasons`, `status`, `num_nodes` [B].
    """

    def __init__(
        self,
        target: CausalLM,
        draft: Draft,
        state: SlotState,
        reserve: int,
        sampling_of: Callable[[int], SamplingParams],
        emit: Emit,
    ) -> None:
        self.target, self.draft, self.state = target, draft, state
        self._round = Round(target, draft, state, reserve)
        self._sampling_of = sampling_of  # by request id; with its seed
        self.emit = emit
        self._tokens: dict[int, Tensor] = {}  # per slot in prefill: its whole text

        num_slots = len(state.seq_lens)

        def host(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        self.out_tokens = host(num_slots, draft.accept_width)
        self.out_len, self.finish_reasons = host(num_slots), host(num_slots)
        self.status, self.num_nodes = host(num_slots), host(num_slots)

    @property
    def _device(self) -> torch.device:
        return self.state.seq_lens.device

    def _slot_tensor(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def begin(self, slot: int, request_id: int, text: list[int]) -> None:
        state = self.state
        self._empty(slot)  # it is, unless an interrupt cut `deactivate` short
        self._tokens[slot] = torch.tensor(text, dtype=torch.int32, device=self._device)
        state.status[slot] = 0
        # All pages up to the first round at once, as the scheduler counts them. A slot that got none would only stall
        # in a round, but its prefill would be lost without a trace.
        reserve = len(text) - 1 + self._round.reserve
        alloc_pages(state.pool, state.seq_lens, reserve, slots=self._slot_tensor([slot]), status=state.status)
        if int(state.status[slot]) & Status.STALLED:
            raise RuntimeError(f"begin: the pool has too few pages for {reserve} rows, expected those of slot {slot}")
        self.draft.begin(slot, request_id, text)

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: list[int], start: int, is_last: bool) -> None:
        state, text, end = self.state, self._tokens[slot], start + len(tokens)
        slots = self._slot_tensor([slot])
        chunk = text[None, start:end]
        positions = torch.arange(start, end, dtype=torch.int32, device=self._device)[None]
        self.target.forward(chunk, positions, state.rows(slots, state.seq_lens, tail_len=len(tokens)))
        self.draft.prefill(slots, chunk, text[None, start + 1 : end + 1], positions, self.target.features())
        state.seq_lens[slot] = end

    @torch.inference_mode()
    def activate(
        self, slot: int, request_id: int, seq_len: int, root: int, remaining: int, stop_tokens: list[int]
    ) -> None:
        state = self.state
        del self._tokens[slot]
        state.seq_lens[slot] = seq_len
        state.root_tokens[slot] = root
        state.remaining[slot] = remaining
        state.stop_tokens[slot] = -1
        state.stop_tokens[slot, : len(stop_tokens)] = torch.tensor(stop_tokens, dtype=torch.int32, device=self._device)
        sampling = self._sampling_of(request_id)
        state.temperature[slot] = sampling.temperature
        state.top_k[slot] = sampling.top_k
        state.top_p[slot] = sampling.top_p
        state.min_p[slot] = sampling.min_p
        state.seeds[slot] = sampling.seed or 0
        state.finish_reasons[slot] = 0
        self.draft.activate(self._slot_tensor([slot]))

    def round(self, slots: list[int]) -> None:
        rows = self._slot_tensor(slots)
        result = self._round.run(rows)
        batch = len(slots)
        self.out_tokens[:batch] = result.accepted.tokens
        self.out_len[:batch] = result.accepted.lengths
        self.num_nodes[:batch] = result.num_nodes
        self.finish_reasons[:batch] = self.state.finish_reasons[rows]
        self.status[:batch] = self.state.status[rows]

    @torch.inference_mode()
    def deactivate(self, slot: int, request_id: int) -> None:
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._tokens.pop(slot, None)
        self.state.seq_lens[slot] = 0
        free_pages(self.state.pool, self.state.seq_lens, slots=self._slot_tensor([slot]), status=self.state.status)
        self.draft.release(slot)
