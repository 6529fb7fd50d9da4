"""The device work that the C++ scheduler calls: slots begin, prefill, run rounds and end. Results return by a ring."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.layers.paged_batch import PagedBatch
from ...ops import alloc_pages, assign_pages
from ..drafts import DraftRequest
from ..drafts.composition import restore_slot, walk
from ..host_tensors import to_device
from ..logit_edits import LogitEdit
from ..prompt_scores import PromptScores
from ..slot_inputs import SlotInputs
from .prefill_graphs import Passes
from .round import Round

if TYPE_CHECKING:
    from ..._C import AdmittedRequest, ConstrainedRow, PrefillChunk


MOST_ASSIGNED = 512  # entries of one call of `assign_pages`


class Executor:
    """Turns the scheduler's decisions into device work; only `progress` waits for it.

    All calls come from the scheduler's thread, on the stream of the rounds.
    """

    def __init__(self, round: Round, prefill_chunk: int) -> None:
        self.round, self.prefill_chunk = round, prefill_chunk
        self.passes = Passes(round.target, round.draft, round.state)
        self.target, self.draft, self.state = round.target, round.draft, round.state
        self.not_captured: str | None = None  # why rounds are launched call by call instead of as graphs
        # The saved draft state of slots whose request has migrated, until they are activated.
        self.migrated_drafts: dict[int, dict[str, Tensor]] = {}
        self._edited: set[int] = set()  # slots whose last request had logit edits
        self._scores: dict[int, PromptScores] = {}  # of slots whose prompts are scored
        device = self.state.seq_lens.device
        self._slots = torch.arange(len(self.state.seq_lens), dtype=torch.int32, device=device)

    @torch.inference_mode()
    def begin(self, slot: int, request: AdmittedRequest) -> None:
        tokens, cached = request.tokens, request.cached_entries
        inputs: SlotInputs = request.extra or SlotInputs()
        state, slots = self.state, self._slots[slot : slot + 1]
        self.target.begin(slot)
        if inputs.on_begin is not None:
            inputs.on_begin()
        if cached:
            first = slot * state.pool.page_table.shape[1]
            self.assign_pages(cached, [*range(first, first + len(cached))])
            state.pool.page_counts[slot] = len(cached)
        if state.window is None:
            # The slot gets all pages up to its first round at once, as the scheduler counts them. If there are too few,
            # it stalls, and its activation reports an error.
            rows = len(tokens) - 1 + self.round.reserve
            alloc_pages(state.pool, state.seq_lens, rows, slots=slots, status=state.status)
        if request.snapshot >= 0:  # the first chunk's recurrent layers go on from it, after the cached rows
            assert self.target.states is not None
            self.target.states.restore_snapshot(slot, request.snapshot)
            state.seq_lens[slot] = len(cached) * state.pool.page_size
        self._scores.pop(slot, None)
        if inputs.scores is not None:
            self._scores[slot] = inputs.scores
        if inputs.edit is not None or slot in self._edited:
            self._edit(slot, inputs.edit, tokens)
        rows, kept = len(cached) * state.pool.page_size, None
        if inputs.kv is not None:
            kept = inputs.kv.unpack(state, self.target, self.draft, slots, self.prefill_chunk, len(tokens) - 1)
        if kept is not None:
            self.migrated_drafts[slot] = kept
            rows = len(tokens) - 1
        drafted = DraftRequest(request.id, tokens, request.ngram_group, inputs.prediction, rows)
        for draft in walk(self.draft):
            draft.begin(slot, drafted)

    @torch.inference_mode()
    def features_of(self, tokens: list[int]) -> Tensor | None:
        """Return the states [T, layers * H] that enter the feature layers for a text; None: there are no such layers.

        No slot may have a request: KV rows are written over.
        """
        device, count = self.state.seq_lens.device, len(tokens)
        row = torch.tensor([tokens], dtype=torch.int32, device=device)
        pages = torch.arange(-(-count // self.state.pool.page_size), dtype=torch.int32, device=device)[None]
        positions = torch.arange(count, dtype=torch.int32, device=device)[None]
        table = pages.expand(len(self._slots), -1).contiguous()  # a recurrent state has a place for each slot
        none = torch.zeros(len(table), dtype=torch.int32, device=device)
        rows = PagedBatch(slots=none[:1], page_table=table, prefix_lens=none, tail_len=count)
        features = self.target.prefill(row, positions, rows).features
        return None if features is None else features.view(count, -1)

    def _edit(self, slot: int, edit: LogitEdit | None, tokens: list[int]) -> None:
        masks = self.round.masks
        if masks is not None:
            masks.matchers.pop(slot, None)
        if edit is None:
            self.state.edits.kinds[slot] = 0
            self._edited.remove(slot)
        else:
            edit.write(self.state.edits, slot, tokens)
            self._edited.add(slot)
            if edit.new_matcher is not None:
                assert masks is not None  # else the engine refuses the request
                masks.matchers[slot] = matcher = edit.new_matcher()
                for token in tokens[edit.num_prompt_tokens :]:
                    matcher.accept(token)

    @torch.inference_mode()
    def assign_pages(self, sources: list[int], destinations: list[int]) -> None:
        entries = to_device(array("i", sources + destinations), self.state.seq_lens.device).view(2, -1)
        for begin in range(0, len(sources), MOST_ASSIGNED):
            assign_pages(self.state.all_pages, *entries[:, begin : begin + MOST_ASSIGNED])

    @torch.inference_mode()
    def prefill(self, chunks: list[PrefillChunk]) -> None:
        self.passes.run(chunks, self._scores)

    @torch.inference_mode()
    def save_snapshots(self, slots: list[int], snapshots: list[int]) -> None:
        assert self.target.states is not None
        for slot, snapshot in zip(slots, snapshots, strict=True):
            self.target.states.save_snapshot(slot, snapshot)

    @torch.inference_mode()
    def activate(self, slots: list[int]) -> None:
        rows = to_device(array("i", slots), self.state.seq_lens.device)
        if self.state.sliding():  # chunks got pages for themselves alone
            self.state.make_room(rows, self.round.reserve)
        if arrived := [slot for slot in slots if slot in self.migrated_drafts]:
            for slot in arrived:
                restore_slot(self.draft, slot, self.migrated_drafts.pop(slot))
            rows = to_device(array("i", [slot for slot in slots if slot not in arrived]), rows.device)
        if len(rows) > 0:
            for draft in walk(self.draft):
                draft.activate(rows)

    def launch(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        self.round.launch(batch, num_rows, max_kv_len)

    def forward(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        self.round.forward(batch, num_rows, max_kv_len)

    def finish(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        self.round.finish(batch, num_rows, max_kv_len)

    @torch.inference_mode()
    def constrain(self, number: int, requests: list[ConstrainedRow], batch: int, num_rows: int) -> None:
        if requests:
            assert self.round.masks is not None
            self.round.masks.fill(number, requests, batch, self.round.most_nodes(batch, num_rows), self.is_busy)

    def is_busy(self) -> bool:
        """Return whether the device is working."""
        device = self.state.seq_lens.device
        return device.type == "cuda" and not torch.cuda.current_stream(device).query()

    def deactivate(self, slots: list[int]) -> None:
        for slot in slots:
            self.migrated_drafts.pop(slot, None)
            self._scores.pop(slot, None)
            for draft in walk(self.draft):
                draft.release(slot)

    def progress(self) -> tuple[int, int]:
        return int(self.round.rings.num_applied), int(self.round.rings.num_published)
