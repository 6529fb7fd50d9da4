"""One request: its output so far, how it ended, and threads that wait for either."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Condition
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .. import _C
from ..status import FinishReason, Status
from .outputs import GenerationError, NewTokens, RequestOutput, TokenLogprob
from .params import SamplingParams
from .prompt_scores import PromptScores
from .slot_inputs import KvSource, SlotInputs
from .text.detokenizer import Detokenizer
from .text.stop_strings import StopStrings

if TYPE_CHECKING:
    from .._C import RequestUpdate
    from .grammars import NewMatcher

logger = logging.getLogger(__name__)

NO_ERROR = Status(0)

# Called once a turn, by the thread that delivers results, with the requests that have an update, in the order of the
# updates. A request with updates of two turns may be listed twice.
OnUpdate = Callable[[list[Any]], None]


class RequestHost(Protocol):
    """The engine, as far as a request that it runs needs it."""

    @property
    def detokenizer(self) -> Detokenizer | None:
        """Return what decodes outputs, or None without a tokenizer."""

    def cancel(self, request_id: int) -> bool:
        """End a request after the round that runs; return False if it had ended."""

    def expect_to_wait(self) -> None:
        """Raise RuntimeError in a thread that must not wait for a request."""


class RequestSpec(NamedTuple):
    """A request as its caller gave it and the engine completed it."""

    place: int  # among the prompts submitted with it: the index of its output
    prompt: list[int]
    params: SamplingParams  # with a seed if one is needed
    stop_tokens: list[int]
    stop: StopStrings | None
    num_logprobs: int  # -1: none, 0: that of the token only
    num_prompt_logprobs: int = -1
    new_matcher: NewMatcher | None = None  # of its grammar, if it has one
    prediction: Sequence[int] = ()
    sample: int = 0  # among the n samples of its prompt


@dataclass(frozen=True)
class ResumedRequest:
    """State that a request brings from the engine that it has left."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None] | None
    index: int
    sample: int
    counts: Sequence[int]  # rounds, drafted, accepted and cached tokens
    kv: KvSource
    trusted: bool  # its rows may serve other requests


class RequestTimes:
    """Times of a request, of `time.perf_counter`.

    Attributes:
        submitted: when it was submitted.
        begun: when it got its first slot; None: it has had none.
        chunks: when each of its chunks came, the end included.
    """

    def __init__(self) -> None:
        self.submitted = time.perf_counter()
        self.begun: float | None = None
        self.chunks = array("d")

    def begin(self) -> None:
        """Note that the request has a slot."""
        if self.begun is None:
            self.begun = time.perf_counter()


class BaseRequest:
    """What `Request` and `AsyncRequest` share: one thread writes the output, any number of threads read it.

    Nothing is queued for readers. A reader remembers how many chunks it has seen, and finds the tokens of later chunks
    in `output`. A slow reader costs only the memory of the tokens.

    Attributes:
        id: the engine's number for it; ids increase.
        params: how it is decoded, with a seed if one is needed.
        output: the result so far.
        stop_tokens, prediction: token ids, by `params` and the model.
        times: of its course through the engine.
        host: the engine that runs it.
        status: why the device gave up on it.
        error: exception that ended it, or None.
    """

    def __init__(self, host: RequestHost, spec: RequestSpec, on_update: OnUpdate) -> None:
        params = spec.params
        self.id = -1
        self.params, self.on_update, self.host = params, on_update, host
        self.output = RequestOutput(
            spec.place,
            spec.prompt,
            seed=params.seed if params.temperature > 0 else None,
            logprobs=[] if spec.num_logprobs >= 0 else None,
            sample=spec.sample,
        )
        self.times = RequestTimes()
        self.status = NO_ERROR
        self.error: BaseException | None = None
        self.stop_tokens, self.prediction = spec.stop_tokens, spec.prediction
        self._stop, self._num_logprobs, self._new_matcher = spec.stop, spec.num_logprobs, spec.new_matcher
        self._prompt_scores: PromptScores | None = None
        if spec.num_prompt_logprobs >= 0:
            self._prompt_scores = PromptScores(len(spec.prompt), spec.num_prompt_logprobs)
        # A resumed request brings them again. Its first chunk is that of its first new token all the same.
        self.output.tokens += params.generated_token_ids
        self._counts_before: Sequence[int] = (0, 0, 0, 0)  # of another engine: rounds, drafted, accepted, cached tokens
        self._migrated_kv: KvSource | None = None
        self._cacheable = True
        self._ends = array("q")  # number of tokens after each chunk
        self._ends_as: FinishReason | None = None  # decided here, while the scheduler still runs it
        self._num_chunks: int | None = None  # in total, once there will be no more
        self._done = False
        self._callbacks: deque[Callable[[Any], object]] = deque()

    def __repr__(self) -> str:
        state = self.output.finish_reason.name if self._done else "RUNNING"
        return f"<{type(self).__name__} {self.id}: {len(self.output.tokens)} tokens, {state}>"

    def resume(self, resumed: ResumedRequest) -> None:
        """Go on, once submitted, from where the request left another engine, with the KV rows that it brings."""
        output = self.output
        moved = resumed.tokens[len(output.tokens) :]
        output.tokens += moved
        if output.logprobs is not None:
            output.logprobs += resumed.logprobs
        output.prompt_logprobs, self._prompt_scores = resumed.prompt_logprobs, None
        output.index, output.sample = resumed.index, resumed.sample
        self._counts_before, self._migrated_kv, self._cacheable = resumed.counts, resumed.kv, resumed.trusted
        output.stats.rounds, output.stats.drafted, output.stats.accepted, output.cached_tokens = resumed.counts
        if self._stop is not None:
            self._stop.find(moved)
        if moved:
            self.times.chunks.append(time.perf_counter())
            self._ends.append(len(output.tokens))

    def submission(self, stream: bool) -> _C.Submission:
        """Return what the scheduler needs to know about the request."""
        params, produced = self.params, self.output.tokens
        edit = params.edits(len(self.output.prompt_tokens), self._new_matcher)
        inputs = SlotInputs(edit, self.prediction, self._migrated_kv, self._prompt_scores, self.times.begin)
        return _C.Submission(
            prompt=[*self.output.prompt_tokens, *produced],
            max_new_tokens=params.max_new_tokens - len(produced),
            stop_tokens=self.stop_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            streams=stream or self._stop is not None,
            min_new_tokens=max(params.min_new_tokens - len(produced), 0),
            num_logprobs=self._num_logprobs,
            ngram_group=params.ngram_group,
            max_nodes=params.max_nodes,
            extra=inputs,
            constrained=self._new_matcher is not None,
            migrated=self._migrated_kv is not None,
            cacheable=self._cacheable,
            shares_prefix=self._prompt_scores is None,
            priority=params.priority,
            timeout_ns=params.timeout_ns,
            client=params.client,
        )

    def done(self) -> bool:
        """Return whether it has ended, and given back its slot and its pages."""
        return self._done

    def cancel(self) -> bool:
        """End the request after the round that runs; the output keeps the tokens up to then.

        Callable from any thread, any number of times. Returns False if the request had ended.
        """
        return self.host.cancel(self.id)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(request)` after the end of the request: at once if it has ended.

        Callbacks run in the thread that delivers the results of all requests. They should be short, and cannot wait for
        another request. Exceptions of a callback are logged.
        """
        self._callbacks.append(callback)
        if self._done:
            self.run_callbacks()

    # --- for the thread that delivers results

    def add_update(self, update: RequestUpdate) -> bool:
        """Add an update of the scheduler to the output. Return whether readers have something new to see."""
        output, reason = self.output, update.reason
        if self._ends_as is not None:
            # Rounds that were in flight when the end was decided add nothing.
            if not reason:
                return False
            self._end(self._ends_as)
            return True
        tokens, accepted, status, error = update.tokens, update.accepted, update.status, update.error
        logprobs = None if update.scores is None else token_logprobs(*update.scores, self._num_logprobs)
        if self._stop is not None and (kept := self._stop.find(tokens)) is not None:
            accepted -= len(tokens) - kept
            tokens = tokens[:kept]
            logprobs = logprobs and logprobs[:kept]
            output.text = self._stop.text
            self._ends_as = FinishReason.STOP
            if reason:
                reason, status, error = FinishReason.STOP, 0, None
            else:
                self.cancel()
        output.tokens += tokens
        if output.logprobs is not None and logprobs is not None:
            output.logprobs += logprobs
        stats, before = output.stats, self._counts_before
        stats.rounds, stats.drafted = update.rounds + before[0], update.drafted + before[1]
        cached = min(update.cached, len(output.prompt_tokens))  # of rows of generated tokens, too
        stats.accepted, output.cached_tokens = accepted + before[2], cached + before[3]
        if reason:
            self.status, self.error = Status(status), error
            self._end(FinishReason(reason))
        else:
            self.times.chunks.append(time.perf_counter())
            self._ends.append(len(output.tokens))
        return True

    def fail(self, error: BaseException, *, released: bool) -> None:
        """End with an exception of `update`; `released`: the scheduler has let the request go."""
        self.error, self._ends_as = error, FinishReason.ERROR
        if released:
            self._end(FinishReason.ERROR)
        else:
            self.cancel()

    def _end(self, reason: FinishReason) -> None:
        # In this order: a reader that sees the last chunk sees that it is the last.
        self.output.finish_reason = reason
        self._num_chunks = len(self._ends) + 1
        self.times.chunks.append(time.perf_counter())
        self._ends.append(len(self.output.tokens))
        self._done = True

    def run_callbacks(self) -> None:
        """Run the callbacks that have not run yet, each once."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            try:
                callback(self)
            except Exception:
                logger.exception("a callback of %r failed", self)

    # --- for readers

    @property
    def num_chunks(self) -> int:
        """Return the number of updates so far: one for each round that emitted tokens, and one for the end."""
        return len(self._ends)

    def chunks(self, begin: int, end: int) -> NewTokens:
        """Return chunks `begin` to `end` (exclusive) as one."""
        ends, output, num_given = self._ends, self.output, len(self.params.generated_token_ids)
        bounds = [ends[begin - 1] if begin else num_given, *ends[begin:end]]
        scored = slice(bounds[0] - num_given, bounds[-1] - num_given)
        return NewTokens(
            output.index,
            output.tokens[bounds[0] if begin else 0 : bounds[-1]],
            output.finish_reason if end == self._num_chunks else FinishReason.RUNNING,
            None if output.logprobs is None else output.logprobs[scored],
            [b - a for a, b in pairwise(bounds) if b > a],
            output.sample,
        )

    def outcome(self) -> RequestOutput:
        """Return the output of a request that is done, or raise what ended it."""
        if self.error is not None:
            raise self.error
        if self.output.finish_reason == FinishReason.ERROR:
            raise GenerationError(f"result: request {self.id} ended with {self.why_failed()}", [self.with_text()])
        return self.with_text()

    def why_failed(self) -> str:
        """Return the status of a request that the device gave up on, and its grammar if that allows no token."""
        make = self._new_matcher
        if self.status == Status.BAD_LOGITS and make is not None and make.is_dead_end(self.output.tokens):
            kind, _ = self.params.constraint
            return f"{self.status.name}: no token continues the text under this {kind}"
        return str(self.status.name)

    def with_text(self) -> RequestOutput:
        """Return the output of a request that is done, with its text. Readers decode, not the delivering thread."""
        output, detokenizer = self.output, self.host.detokenizer
        if output.text is None and detokenizer is not None:
            output.text = detokenizer.text(output.prompt_tokens, output.tokens)
        self.read_prompt_logprobs()
        return output

    def read_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Return the log-probabilities of the prompt, which are there with the first token; None: there are none yet.

        Readers convert them, not the delivering thread.
        """
        scores, output = self._prompt_scores, self.output
        if output.prompt_logprobs is None and scores is not None and scores.is_complete:
            output.prompt_logprobs, self._prompt_scores = scores.read(), None
        return output.prompt_logprobs


class Request(BaseRequest):
    """A request started by `Engine.submit`.

    Iterate over it for its tokens as they are committed: `for new in request` yields `NewTokens` of the rounds since
    the last look, until one has a finish reason. Each iteration starts with the first token, also in several threads
    and after the end. All methods may be called from any thread.
    """

    def __init__(self, host: RequestHost, spec: RequestSpec) -> None:
        self._updated = LazyCondition()
        super().__init__(host, spec, self._updated.notify_all)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end of the request.

        Args:
            timeout: seconds. None: no limit.

        Returns:
            The output; of a cancelled or timed-out request, the tokens up to then.

        Raises:
            TimeoutError: the request still runs after `timeout` seconds.
            GenerationError: the device gave up on the request.
            Exception: raised by its part of a round or of a prefill.
        """
        if not self._wait_for(self.done, timeout):
            raise TimeoutError(f"result: request {self.id} goes on, expected its end within {timeout} s")
        return self.outcome()

    def __iter__(self) -> Iterator[NewTokens]:
        new, seen = None, 0
        while new is None or not new.finish_reason:
            begin, seen = seen, self._wait_for_chunk(seen)
            new = self.chunks(begin, seen)
            if new.finish_reason == FinishReason.ERROR:
                self.outcome()
            yield new

    def _wait_for_chunk(self, seen: int) -> int:
        """Wait for more than `seen` chunks, and return their number."""
        self._wait_for(lambda: self.num_chunks > seen)
        return self.num_chunks

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        if condition():
            return True
        self.host.expect_to_wait()
        return self._updated.wait_for(condition, timeout)


class LazyCondition:
    """A condition variable whose `notify_all` costs next to nothing while no thread waits."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._num_waiting = 0

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the predicate holds, at most `timeout` seconds; return whether it holds."""
        with self._condition:
            # First the count, then the predicate: `notify_all` reads the count after the predicate has changed.
            self._num_waiting += 1
            try:
                return self._condition.wait_for(predicate, timeout)
            finally:
                self._num_waiting -= 1

    def notify_all(self, _requests: list[Any]) -> None:
        """Wake all waiting threads (an `OnUpdate`)."""
        if self._num_waiting:
            with self._condition:
                self._condition.notify_all()


def token_logprobs(
    logprobs: list[float], top_ids: list[int], top_logprobs: list[float], num_top: int
) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, each with its `num_top` entries of the flat lists."""
    tops = list(zip(top_ids, top_logprobs, strict=True))
    return [TokenLogprob(own, tops[i * num_top : (i + 1) * num_top]) for i, own in enumerate(logprobs)]
