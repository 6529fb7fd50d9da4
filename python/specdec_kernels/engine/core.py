"""The core of an engine: what `Engine`, `AsyncEngine`, the server and requests share. Internal to the package."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..models.backends.self_check import ModuleMismatchError
from ..models.backends.whole_head import gathered_head, with_head
from ..models.language_model import LanguageModel
from ..parallel.ranks import Ranks, expect_alive, fail
from ..status import FinishReason
from .acceptance import AcceptanceMonitor
from .drafts import Draft
from .drafts.composition import close_draft, expect_closed
from .follower import follow, open_ranks
from .inputs import InputProcessor
from .loading import Loading, place_for
from .options import EngineOptions
from .outputs import NewTokens
from .params import SamplingParams
from .request import BaseRequest
from .startup import Runtime, forget, on_stream
from .stats import EngineStats, read_stats
from .text.detokenizer import Detokenizer
from .threads import EngineThreads
from .transfer.kv_transfer import pack_slot, record_stream
from .transfer.migration import (
    ExportedRequest,
    MigrationPeer,
    check_tensors,
    check_values,
    params_of,
    plain_values,
    resumed_from,
)
from .tuning import tuning_of
from .weight_updates import WeightManager

AnyRequest = TypeVar("AnyRequest", bound=BaseRequest)
OnTokens = Callable[[NewTokens], bool | None]


class EngineCore:
    """Loads target and draft, and runs requests. Requests hold the core, which closes itself when it is collected.

    Attributes:
        draft: as given, or a `Draft` that drafts nothing.
        runtime: config, executor, scheduler, stream and CUDA graphs.
        inputs: from prompts and parameters to request specs.
        threads: which run the scheduler and deliver results.
        weights: updates, sleep and wake.
    """

    def __init__(self, model: str | Path | nn.Module, draft: Draft | None, options: EngineOptions) -> None:
        self.draft = Draft() if draft is None else draft
        expect_closed(self.draft)
        loading = Loading.of(model, self.draft, options, place_for(model, options))
        if options.trace is not None:
            check_writable(options.trace)
        ranks = open_ranks(loading, lambda: (model, self.draft, options))
        if ranks is not None and not ranks.decides:
            follow(loading, ranks)
            raise SystemExit(0)  # the rest of the script is rank 0's
        try:
            loading, self.runtime = opened(loading, ranks)
        except BaseException as error:
            if ranks is not None:
                reason = ranks.channel.failure
                fail(ranks.channel, error)
                ranks.close()
                if reason:
                    raise RuntimeError(f"Engine: {reason}") from error
            raise
        self._target_name, self._rounds = loading.target_name, loading.rounds
        tokenizer, no_tokenizer = loading.tokenizer, loading.no_tokenizer
        self.executor, self.scheduler, self.stream = self.runtime.executor, self.runtime.scheduler, self.runtime.stream
        self.config, self.target, self.state = self.runtime.config, self.executor.target, self.executor.state
        try:
            self.inputs = InputProcessor(self.config, self.target, self.draft, tokenizer, no_tokenizer)
        except BaseException:
            self.runtime.close_ranks()
            close_draft(self.draft)
            raise
        self.threads = EngineThreads(self.scheduler, self.stream, AcceptanceMonitor(self.draft))
        self.weights = WeightManager(self.runtime, self.threads)
        self._closer = weakref.finalize(
            self, close, self.threads, self.draft, self.runtime
        )  # also when the interpreter ends

    # --- for requests (`RequestHost`)

    @property
    def detokenizer(self) -> Detokenizer | None:
        """Return what decodes outputs, or None without a tokenizer."""
        return self.inputs.detokenizer

    def cancel(self, request_id: int) -> bool:
        """End a request after the round that runs; return False if it had ended."""
        return self.threads.cancel(request_id)

    def expect_to_wait(self) -> None:
        """Raise RuntimeError in a thread that must not wait for a request."""
        self.threads.expect_to_wait()

    # --- for `Engine`, `AsyncEngine` and the server

    def expect_open(self) -> None:
        """Raise RuntimeError if the engine is closed, or if a rank has failed."""
        self.threads.expect_open()
        if self.runtime.ranks is not None:
            expect_alive(self.runtime.ranks.channel)

    def expect_ready(self) -> None:
        """Raise RuntimeError as `expect_open`, or in a thread that must not wait for the loop."""
        self.expect_open()
        self.threads.expect_to_wait()

    def new_requests(
        self,
        kind: Callable[..., AnyRequest],
        token_lists: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *notify: Any,
    ) -> list[AnyRequest]:
        """Return requests that have not started, `n` for each prompt.

        Args:
            kind: class of the requests.
            token_lists: the prompts' tokens.
            params: of each prompt.
            notify: further arguments of `kind`.
        """
        return [kind(self, spec, *notify) for spec in self.inputs.specs(token_lists, params)]

    def start(self, requests: Sequence[BaseRequest], stream: bool) -> None:
        """Start all requests, or none."""
        if self.stream is not None:  # the caller's stream may have work to wait for, such as a copy of new weights
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.threads.submit(requests, stream)

    def submit(
        self,
        kind: Callable[..., AnyRequest],
        token_lists: Sequence[list[int]],
        params: Sequence[SamplingParams],
        stream: bool,
        *notify: Any,
    ) -> list[AnyRequest]:
        """Make requests and start them all, or none."""
        requests = self.new_requests(kind, token_lists, params, *notify)
        self.start(requests, stream)
        return requests

    def run(
        self, token_lists: Sequence[list[int]], params: Sequence[SamplingParams], on_tokens: OnTokens | None
    ) -> list[BaseRequest]:
        """Run requests to their end, and return them. If anything raises, cancel all of them and wait for their end."""
        updates: SimpleQueue[list[BaseRequest]] = SimpleQueue()
        requests = self.new_requests(BaseRequest, token_lists, params, updates.put)
        try:
            self.start(requests, on_tokens is not None)
            forward_tokens(requests, updates, on_tokens)
        except BaseException:
            for request in requests:
                request.cancel()
            while any(map(self.threads.is_running, requests)):
                updates.get()
            raise
        finally:
            self.scheduler.settle()  # rounds in flight that no request takes part in
            if self.stream is not None:  # the caller's later work follows them
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return requests

    def export_request(self, request: BaseRequest) -> ExportedRequest:
        """Take a request out of this engine; see `Engine.export_request`."""
        if request.host is not self:
            raise ValueError(f"export_request: request {request.id} is of another engine, expected one of this")
        self.expect_ready()
        has_ended = threading.Event()
        with self.weights.lock:
            with self.threads.paused(request_id=request.id), on_stream(self.stream):
                # In the pause: it takes milliseconds once, in which a short request would end.
                layout, checksum = self._peer.layout, self.weights.checksum_in_pause()
                held = self.scheduler.held(request.id)
                if held is not None:
                    slot, num_rows = held[0], len(held[1]) - 1
                    with self.runtime.on_all_ranks("pack_slot", slot, num_rows):
                        tensors, first_rows = pack_slot(self.state, self.target, self.draft, slot, num_rows)
                    self.scheduler.cancel(request.id)
            if held is not None and self.stream is not None:
                record_stream(torch.cuda.current_stream(self.stream.device), tensors)
        request.add_done_callback(lambda _: has_ended.set())
        if held is not None:
            has_ended.wait()
        if held is None or request.output.finish_reason != FinishReason.CANCELLED:
            raise ValueError(f"export_request: request {request.id} has ended, expected one that runs")
        values = plain_values(request)
        return ExportedRequest(tensors, values | {"layout": layout, "weights": checksum, "first_rows": first_rows})

    def import_request(
        self, kind: Callable[..., AnyRequest], exported: ExportedRequest, stream: bool, trusted: bool, *notify: Any
    ) -> AnyRequest:
        """Continue a request that has left another engine; see `Engine.import_request`."""
        self.expect_open()
        values = exported.values
        check_values(values, self._peer, self.weights.checksum)
        check_tensors(exported, self._peer)
        (request,) = self.new_requests(kind, [values["prompt"]], [params_of(values)], *notify)
        request.resume(resumed_from(exported, self._peer, self.stream, trusted))
        self.start([request], stream)
        return request

    @property
    def failure(self) -> str:
        """Return why a rank has failed, which ends the engine; empty if none has."""
        return "" if self.runtime.ranks is None else self.runtime.ranks.channel.failure

    @property
    def _peer(self) -> MigrationPeer:
        return MigrationPeer(self.target, self.draft, self.config, self.state)

    def tuning(self) -> dict[str, Any]:
        """Return the calibrations and round costs, between two rounds; see `Engine.tuning`."""
        self.expect_open()
        with on_stream(self.stream):
            return tuning_of(self.draft, self._target_name, self.scheduler.costs, self._rounds)

    def forget_texts(self) -> None:
        """Let drafts forget what they learned from requests, for benchmarks. No request may be running."""
        with self.threads.paused(restart=True), on_stream(self.stream), self.runtime.on_all_ranks("forget"):
            forget(self.draft)

    def features_of(self, tokens: list[int]) -> Tensor | None:
        """Return what `Executor.features_of` does, on all ranks. No request may be running."""
        call = self.runtime.on_all_ranks("features_of", tokens)
        with self.threads.paused(restart=True), on_stream(self.stream), call:
            return self.executor.features_of(tokens)

    def whole_target(self) -> LanguageModel:
        """Return the target with its whole LM head on this rank, for passes of drafts that other ranks do not make."""
        if self.runtime.ranks is None:
            return self.target
        with self.threads.paused(), on_stream(self.stream), self.runtime.on_all_ranks("gather_head"):
            head = gathered_head(self.target)
        return with_head(self.target, head)

    def stats(self) -> EngineStats:
        """Return counts and times of rounds so far."""
        threads = self.threads
        return read_stats(self.scheduler, self.config, threads.emit_seconds, threads.acceptance.read())

    def close(self) -> None:
        """Cancel all requests, end the threads and close the draft. Idempotent, from any thread."""
        self._closer()
        self.threads.close()  # a second caller waits for the threads, too


def forward_tokens(
    requests: Sequence[BaseRequest], updates: SimpleQueue[list[BaseRequest]], on_tokens: OnTokens | None
) -> None:
    """Call `on_tokens` with each chunk of the requests, in the order of the updates, until all have ended."""
    seen = dict.fromkeys(requests, 0)
    num_running = len(requests)
    while num_running:
        for request in updates.get():
            begin = seen[request]
            seen[request] = end = begin + 1
            new = request.chunks(begin, end)
            if on_tokens is not None and on_tokens(new) and not new.finish_reason:
                request.cancel()
            if new.finish_reason:
                num_running -= 1
                if request.error is not None:
                    raise request.error


def opened(loading: Loading, ranks: Ranks | None) -> tuple[Loading, Runtime]:
    """Load the models; where our layers cannot express the target, and may be replaced, its modules."""
    try:
        return loading, loading.open(ranks)
    except ModuleMismatchError as error:
        # No other backend keeps recurrent states, nor divides a model.
        if loading.options.implementation != "auto" or loading.config.state_bytes or ranks is not None:
            raise
        mismatch = str(error)  # not the error, which holds the first model
    warnings.warn(f"Engine: {mismatch}; its modules run, which is slower", RuntimeWarning, stacklevel=4)
    loading = loading.with_modules()
    return loading, loading.open(None)


def close(threads: EngineThreads, draft: Draft, runtime: Runtime) -> None:
    """End what an engine runs on. It takes no engine, since the engine may have been collected."""
    threads.close()
    runtime.close_ranks()
    close_draft(draft)


def check_writable(trace: str | Path) -> None:
    """Raise ValueError for a file that cannot be written; create it if it does not exist."""
    try:
        with open(trace, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"Engine: trace is {trace}, expected a file that can be written ({error.strerror})") from error
