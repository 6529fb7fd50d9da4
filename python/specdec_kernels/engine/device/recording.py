"""The executor of rank 0, which records each call for the other ranks, and what they make of the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import _C
from ...parallel.ranks import Ranks
from ..logit_edits import LogitEdit
from ..prompt_scores import PromptScores
from ..slot_inputs import KvSource, SlotInputs
from .executor import Executor

if TYPE_CHECKING:
    from ..._C import AdmittedRequest, ConstrainedRow, PrefillChunk


# Returns the source of KV rows that rank 0 has, whose first rows are these by group.
KvReceiver = Callable[[Mapping[str, int]], KvSource]


class RecordedRequest(NamedTuple):
    """A request that begins, as other ranks need it: without what is the host's, such as a grammar."""

    fields: dict[str, Any]  # of `AdmittedRequest`, without its extra
    edit: LogitEdit | None
    prediction: Sequence[int]
    scores: tuple[int, int] | None  # tokens of the prompt that is scored, and alternatives to each
    first_rows: dict[str, int] | None  # of the KV rows that it brings, which rank 0 has

    @classmethod
    def of(cls, request: AdmittedRequest) -> RecordedRequest:
        inputs: SlotInputs = request.extra or SlotInputs()
        edit, scores = inputs.edit, inputs.scores
        # A prompt whose scores are complete is not scored again.
        to_score = None if scores is None or scores.is_complete else (scores.num_tokens, scores.num_top)
        names = "id", "tokens", "ngram_group", "cached_entries", "snapshot"
        return cls(
            {name: getattr(request, name) for name in names},
            None if edit is None else edit._replace(new_matcher=None, bias=dict(edit.bias)),
            list(inputs.prediction),
            to_score,
            dict(inputs.kv.first_rows) if inputs.kv is not None and inputs.kv.is_pending else None,
        )

    def admitted(self, receive_kv: KvReceiver) -> AdmittedRequest:
        """Return the request for another rank's executor."""
        kv = None if self.first_rows is None else receive_kv(self.first_rows)
        scores = None if self.scores is None else PromptScores(*self.scores)
        return _C.AdmittedRequest(**self.fields, extra=SlotInputs(self.edit, self.prediction, kv, scores))


class RecordingExecutor:
    """Makes the calls of an executor, each after it has been recorded.

    Launches are recorded in C++, where they are made.
    """

    def __init__(self, executor: Executor, ranks: Ranks) -> None:
        self._executor, self._record = executor, ranks.record
        self.launch, self.forward, self.finish = executor.launch, executor.forward, executor.finish
        self.progress = executor.progress

    def begin(self, slot: int, request: AdmittedRequest) -> None:
        self._record("begin", slot, RecordedRequest.of(request))
        self._executor.begin(slot, request)

    def prefill(self, chunks: list[PrefillChunk]) -> None:
        self._record("prefill", [(chunk.slot, chunk.start, chunk.tokens) for chunk in chunks])
        self._executor.prefill(chunks)

    def save_snapshots(self, slots: list[int], snapshots: list[int]) -> None:
        self._record("save_snapshots", slots, snapshots)
        self._executor.save_snapshots(slots, snapshots)

    def activate(self, slots: list[int]) -> None:
        self._record("activate", slots)
        self._executor.activate(slots)

    def deactivate(self, slots: list[int]) -> None:
        self._record("deactivate", slots)
        self._executor.deactivate(slots)

    def assign_pages(self, sources: list[int], destinations: list[int]) -> None:
        self._record("assign_pages", sources, destinations)
        self._executor.assign_pages(sources, destinations)

    def constrain(self, number: int, requests: list[ConstrainedRow], batch: int, num_rows: int) -> None:
        """Find the allowed tokens here alone, and record them: no other rank has a grammar."""
        self._executor.constrain(number, requests, batch, num_rows)
        masks = self._executor.round.masks
        if requests and masks is not None and masks.filled:
            rows = masks.filled
            self._record("allow", number, rows.start, masks.on_host[rows.start : rows.stop].numpy().tobytes())


class ReplayedCalls:
    """The calls that `RecordingExecutor` records, made on another rank's executor."""

    def __init__(self, executor: Executor, receive_kv: KvReceiver) -> None:
        self._executor, self._receive_kv = executor, receive_kv
        self.save_snapshots, self.activate = executor.save_snapshots, executor.activate
        self.deactivate, self.assign_pages = executor.deactivate, executor.assign_pages

    def begin(self, slot: int, request: RecordedRequest) -> None:
        self._executor.begin(slot, request.admitted(self._receive_kv))

    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        each = [_C.PrefillChunk(slot=slot, start=start, tokens=tokens) for slot, start, tokens in chunks]
        self._executor.prefill(each)

    @torch.inference_mode()
    def allow(self, number: int, first: int, words: bytes) -> None:
        masks = self._executor.round.masks
        assert masks is not None
        masks.take(number, first, torch.frombuffer(bytearray(words), dtype=torch.int32), self._executor.is_busy)
