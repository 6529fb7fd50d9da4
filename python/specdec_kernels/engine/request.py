"""One request: what it has produced so far, how it ended, and how threads wait for either."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Condition
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _C
from ..status import FinishReason, Status
from .outputs import GenerationError, NewTokens, RequestOutput, TokenLogprob
from .params import SamplingParams
from .text.stop_strings import StopStrings
from .transfer.migration import Arrival, logprobs_of

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

FINE = Status(0)

# Called once a turn, by the thread that hands out results, with the requests that gained something, in the order in
# which they did: one that gained something in two turns may be there twice.
Tell = Callable[[list[Any]], None]


class Order(NamedTuple):
    """What a request is made of, as its caller gave it and the engine completed it."""

    place: int  # among the prompts submitted with it: the index of its output
    prompt: list[int]
    params: SamplingParams  # with a seed where one is needed
    stop_tokens: list[int]
    stop: StopStrings | None
    num_logprobs: int  # -1: none, 0: of the token alone
    new_matcher: Callable[[], Any] | None = None  # of its grammar, if it has one
    prediction: Sequence[int] = ()
    sample: int = 0  # of those of its prompt


class BaseRequest:
    """What `Request` and `AsyncRequest` share: one thread writes what the request gains, any number read it.

    Nothing is queued for readers. A reader remembers how many rounds it has seen, and finds the tokens of all others in
    `output`: who reads late, or never, costs the memory of the tokens alone.

    Attributes:
        id: the engine's number for it. Ids rise.
        params: how it is decoded, with a seed where one is needed.
        output: the result as far as it has come.
        stop_tokens, prediction: token ids, as `params` and the model have them.
    """

    def __init__(self, engine: Engine, order: Order, tell: Tell) -> None:
        place, prompt, params, stop_tokens, stop, num_logprobs, new_matcher, prediction, sample = order
        self.id = -1
        self.params, self.tell = params, tell
        self.output = RequestOutput(
            place,
            prompt,
            seed=params.seed if params.temperature > 0 else None,
            logprobs=[] if num_logprobs >= 0 else None,
            sample=sample,
        )
        self.status = FINE  # where the device gave up on it: why
        self.error: BaseException | None = None  # what ended it, where that was an exception
        self._engine = engine
        self.stop_tokens, self.prediction = stop_tokens, prediction
        self._stop, self._num_logprobs, self._new_matcher = stop, num_logprobs, new_matcher
        self._before: Sequence[int] = (0, 0, 0, 0)  # rounds and so on that it had in another engine
        self._arrival: Arrival | None = None
        self._ends = array("q")  # of each emission: how many tokens there were behind it
        self._ends_as: FinishReason | None = None  # decided here, while the scheduler has not let it go yet
        self._num_pieces: int | None = None  # when there will be no more
        self._done = False
        self._callbacks: deque[Callable[[Any], object]] = deque()

    def __repr__(self) -> str:
        state = self.output.finish_reason.name if self._done else "RUNNING"
        return f"<{type(self).__name__} {self.id}: {len(self.output.tokens)} tokens, {state}>"

    def resume(self, values: Mapping[str, Any], arrival: Arrival) -> None:
        """Before it is submitted: it goes on from where it left another engine, with the rows that it brings along."""
        output = self.output
        output.tokens += values["tokens"]
        if output.logprobs is not None:
            output.logprobs += logprobs_of(values)
        output.index, output.sample = values["index"], values["sample"]
        self._before, self._arrival = values["counts"], arrival
        output.stats.rounds, output.stats.drafted, output.stats.accepted, output.cached_tokens = self._before
        if self._stop is not None:
            self._stop.find(output.tokens)
        if output.tokens:
            self._ends.append(len(output.tokens))

    def submission(self, stream: bool) -> _C.Submission:
        """Return what the scheduler needs to know about the request."""
        params, produced = self.params, self.output.tokens
        edit = params.edits(len(self.output.prompt_tokens), self._new_matcher)
        extra = edit, self.prediction, self._arrival
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
            extra=extra if any(extra) else None,
            constrained=self._new_matcher is not None,
            migrated=self._arrival is not None,
            priority=params.priority,
            timeout_ns=params.timeout_ns,
        )

    def done(self) -> bool:
        """Whether it has ended. Then it has given its slot and its pages back."""
        return self._done

    def cancel(self) -> bool:
        """End it as soon as the round that runs is over; the output keeps what came until then.

        Returns False where it had ended already. Any thread, any number of times.
        """
        return self._engine._loop.cancel(self.id)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(request)` when it has ended: at once, where it has already.

        Callbacks run in the thread that hands out results to all requests: they should be short, and cannot wait for
        another request. What one raises is logged.
        """
        self._callbacks.append(callback)
        if self._done:
            self.run_callbacks()

    # --- for the thread that hands out results

    def gain(
        self,
        tokens: list[int],
        reason: int,
        rounds: int,
        drafted: int,
        accepted: int,
        cached: int,
        status: int,
        scores: tuple[list[float], list[int], list[float]] | None,
        error: BaseException | None,
    ) -> bool:
        """What the scheduler reports of it after a turn. False where that is nothing to a reader."""
        output = self.output
        if self._ends_as is not None:
            # What rounds that were on their way have brought is no part of the output.
            if not reason:
                return False
            self._end(self._ends_as)
            return True
        logprobs = None if scores is None else token_logprobs(*scores, self._num_logprobs)
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
        stats = output.stats
        before = self._before
        stats.rounds, stats.drafted, stats.accepted = rounds + before[0], drafted + before[1], accepted + before[2]
        output.cached_tokens = cached + before[3]
        if reason:
            self.status, self.error = Status(status), error
            self._end(FinishReason(reason))
        else:
            self._ends.append(len(output.tokens))
        return True

    def fail(self, error: BaseException, *, gone: bool) -> None:
        """It ends with what its own handling has raised; `gone`: the scheduler knows it no longer."""
        self.error, self._ends_as = error, FinishReason.ERROR
        if gone:
            self._end(FinishReason.ERROR)
        else:
            self.cancel()

    def _end(self, reason: FinishReason) -> None:
        # Who sees the last piece sees that it is the last.
        self.output.finish_reason = reason
        self._num_pieces = len(self._ends) + 1
        self._ends.append(len(self.output.tokens))
        self._done = True

    def run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # somebody else has just taken the last one
                return
            try:
                callback(self)
            except Exception:
                logger.exception("a callback of %r failed", self)

    # --- for readers

    @property
    def num_pieces(self) -> int:
        """How often it gained something: in a round, or at its end."""
        return len(self._ends)

    def pieces(self, begin: int, end: int) -> NewTokens:
        """What it gained from piece `begin` on, up to `end`, as one."""
        ends, output = self._ends, self.output
        bounds = [ends[begin - 1] if begin else 0, *ends[begin:end]]
        return NewTokens(
            output.index,
            output.tokens[bounds[0] : bounds[-1]],
            output.finish_reason if end == self._num_pieces else FinishReason.RUNNING,
            None if output.logprobs is None else output.logprobs[bounds[0] : bounds[-1]],
            [b - a for a, b in pairwise(bounds) if b > a],
            output.sample,
        )

    def outcome(self) -> RequestOutput:
        """The output of a request that is done, or what it raises."""
        if self.error is not None:
            raise self.error
        if self.output.finish_reason == FinishReason.ERROR:
            raise GenerationError(f"result: request {self.id} ended with {self.status.name}", [self.output])
        return self.with_text()

    def with_text(self) -> RequestOutput:
        """The output of a request that is done: decoding is the reader's work, not that of who hands out results."""
        tokenizer = self._engine.tokenizer
        if self.output.text is None and tokenizer is not None:
            self.output.text = tokenizer.decode(self.output.tokens, skip_special_tokens=True)
        return self.output


class Request(BaseRequest):
    """A request that `Engine.submit` has started.

    Iterate over it for its tokens as they are committed: `for new in request` gives `NewTokens`, of the rounds since
    the last look, until the one with a finish reason. Every iteration begins with the first token, also in several
    threads and after the end. All methods may be called from any thread.
    """

    def __init__(self, engine: Engine, order: Order) -> None:
        self._bell = Bell()
        super().__init__(engine, order, self._bell.ring)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits until it has ended.

        Returns:
            Its output; of one that was cancelled, or out of its time, what came until then.

        Raises:
            TimeoutError: it goes on after `timeout` seconds.
            GenerationError: the device gave up on it.
            Exception: what its part of a round, or of a prefill, has raised.
        """
        if not self._wait_for(self.done, timeout):
            raise TimeoutError(f"result: request {self.id} goes on, expected its end within {timeout} s")
        return self.outcome()

    def __iter__(self) -> Iterator[NewTokens]:
        new, seen = None, 0
        while new is None or not new.finish_reason:
            begin, seen = seen, self._wait_for_piece(seen)
            new = self.pieces(begin, seen)
            if new.finish_reason == FinishReason.ERROR:
                self.outcome()
            yield new

    def _wait_for_piece(self, seen: int) -> int:
        """How many there are when there are more than these."""
        self._wait_for(lambda: self.num_pieces > seen)
        return self.num_pieces

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        if condition():
            return True
        self._engine._loop.expect_to_wait()
        return self._bell.wait_for(condition, timeout)


class Bell:
    """Wakes threads. To ring it costs next to nothing while nobody waits."""

    def __init__(self) -> None:
        self._rung = Condition()
        self._num_waiting = 0

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with self._rung:
            self._num_waiting += 1  # before the condition is looked at, which changes before `ring` looks at this
            try:
                return self._rung.wait_for(condition, timeout)
            finally:
                self._num_waiting -= 1

    def ring(self, _requests: list[Any]) -> None:
        if self._num_waiting:
            with self._rung:
                self._rung.notify_all()


def token_logprobs(
    logprobs: list[float], top_ids: list[int], top_logprobs: list[float], num_top: int
) -> list[TokenLogprob]:
    tops = list(zip(top_ids, top_logprobs, strict=True))
    return [TokenLogprob(own, tops[i * num_top : (i + 1) * num_top]) for i, own in enumerate(logprobs)]
