"""Requests from any thread: texts, order, cancels, errors, waiting, and the end of engines and processes."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import (
    Engine,
    GenerationError,
    NewTokens,
    Ngram,
    Request,
    SamplingParams,
)
from specdec_kernels.tiny import tiny_model
from support.exhaustive import thinned
from support.leaks import expect_nothing_left
from support.observed_rounds import launches_of, wrap_launch
from support.paused_rounds import rounds_held
from support.random_checkpoints import VOCAB, random_prompts, save_random_model
from support.random_engines import make_engine as random_engine
from support.random_engines import poisoned_folder
from support.request_engines import DRAFTS, LONG, NEW_TOKENS, make_engine, params, prompts


@pytest.mark.parametrize("name", thinned(DRAFTS, "union".__eq__))
def test_submit_texts_equal_generate(name: str, device: torch.device) -> None:
    want = make_engine(name, device).generate(prompts(), params())
    with make_engine(name, device) as engine:
        requests = [engine.submit(*pair) for pair in zip(prompts(), params(), strict=True)]
        assert [request.id for request in requests] == list(range(len(requests)))
        for request, output in zip(requests, want, strict=True):
            got = request.result()
            assert (got.tokens, got.text, got.finish_reason) == (output.tokens, output.text, output.finish_reason)
            assert (got.prompt_tokens, got.seed) == (output.prompt_tokens, output.seed) and request.done()
            assert (got.logprobs is None) == (output.logprobs is None)
            assert got.stats.accepted + got.stats.rounds == len(got.tokens) - 1
        expect_nothing_left(engine)


@pytest.mark.parametrize("stream", [True, False])
def test_submit_many_starts_all_requests(stream: bool) -> None:
    """Texts and token ids, with parameters of their own or the same for all; none is many, too."""
    mixed = [*prompts()[:4], "import os\n", "def area(", *prompts()[6:]]
    with make_engine() as engine:
        assert engine.submit_many([]) == []
        for sampling in (params(), SamplingParams(NEW_TOKENS)):
            want = engine.generate(mixed, sampling)
            requests = engine.submit_many(mixed, sampling, stream=stream)
            first = requests[0].id
            assert [request.id for request in requests] == [*range(first, first + len(mixed))]
            for index, (request, output) in enumerate(zip(requests, want, strict=True)):
                if stream:
                    expect_pieces(list(request), request)
                got = request.result()
                assert (got.tokens, got.text, got.index) == (output.tokens, output.text, index)
                assert got.prompt_tokens == output.prompt_tokens
                assert stream or request.num_chunks == 1 or request.params.stop_strings
        expect_nothing_left(engine)


def test_submit_many_joins_in_one_turn() -> None:
    """Whatever the loop is at when it comes: its first round has all of them."""
    with make_engine("none", num_slots=8, adaptive=False, max_len=1024) as engine:
        rounds = launches_of(engine)
        for _ in range(20):
            rounds.clear()
            engine.generate(prompts(), SamplingParams(2, ignore_eos=True))
            assert [batch for batch, _, _ in rounds if batch] == [8, 8]
            rounds.clear()
            for request in engine.submit_many(prompts(), SamplingParams(2, ignore_eos=True)):
                request.result()
            assert [batch for batch, _, _ in rounds if batch] == [8, 8]


def test_text_is_a_prompt() -> None:
    with make_engine() as engine:
        (want,) = engine.generate("import os\n")
        got = engine.submit("import os\n").result()
        assert (got.prompt_tokens, got.text) == (want.prompt_tokens, want.text)


def expect_pieces(pieces: list[NewTokens], request: Request) -> None:
    output = request.result()
    assert [token for new in pieces for token in new.tokens] == output.tokens
    assert [new.finish_reason for new in pieces[:-1]] == [FinishReason.RUNNING] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == output.finish_reason
    for new in pieces:
        assert sum(new.rounds) == len(new.tokens) and min(new.rounds, default=1) > 0
        assert (new.logprobs is None) == (output.logprobs is None)
    rounds = [count for new in pieces for count in new.rounds]
    assert len(rounds) == 1 + output.stats.rounds and sum(rounds) - len(rounds) == output.stats.accepted
    assert rounds[0] == 1
    if output.logprobs is not None:
        assert [token for new in pieces for token in new.logprobs or []] == output.logprobs


def test_stream_pieces_are_ordered() -> None:
    """Any thread may read a request while it runs and after its end."""
    with make_engine() as engine, ThreadPoolExecutor(24) as pool:
        requests = [engine.submit(*pair) for pair in zip(prompts(), params(), strict=True)]
        readers = [(request, pool.submit(list, request)) for request in requests for _ in range(3)]
        for request, reader in readers:
            expect_pieces(reader.result(300), request)
        for request in requests:
            whole = list(request)
            assert len(whole) == 1, "who comes late has all in one piece"
            expect_pieces(whole, request)


def test_a_piece_is_a_round_for_who_keeps_up() -> None:
    """A device that waits for the reader: there is a piece of every round."""
    turn = threading.Semaphore(0)
    with make_engine("chain") as engine:

        def wait(launch: Callable[..., None], batch: int, num_rows: int, max_kv_len: int) -> None:
            if num_rows:
                assert turn.acquire(timeout=300)
            launch(batch, num_rows, max_kv_len)

        wrap_launch(engine, wait)
        request = engine.submit(prompts()[0], SamplingParams(NEW_TOKENS, ignore_eos=True))
        turn.release()
        pieces = []
        for new in request:
            pieces.append(new)
            turn.release()
        assert len(pieces) == 1 + request.output.stats.rounds > 4 and all(len(new.rounds) == 1 for new in pieces)


def test_request_without_stream_has_one_piece() -> None:
    with make_engine() as engine:
        request = engine.submit(prompts()[0], SamplingParams(NEW_TOKENS, ignore_eos=True), stream=False)
        (piece,) = request
        assert piece.tokens == request.result().tokens and piece.rounds == [NEW_TOKENS]


def test_submit_while_others_run() -> None:
    """Who comes later runs beside them, and ends before them where it is shorter."""
    with make_engine(num_slots=3, max_len=1024) as engine:
        want = [o.tokens for o in engine.generate(prompts()[:3], SamplingParams(8))]
        long = engine.submit(prompts()[0], LONG)
        next(iter(long))
        assert [engine.submit(p, SamplingParams(8)).result().tokens for p in prompts()[:3]] == want
        assert [o.tokens for o in engine.generate(prompts()[:3], SamplingParams(8))] == want
        assert not long.done() and long.cancel()
        assert long.result().finish_reason == FinishReason.CANCELLED and not long.cancel()
        expect_nothing_left(engine)


def test_request_cancel() -> None:
    """Running, waiting for a slot, twice, and after the end."""
    with make_engine(num_slots=1, max_len=1024) as engine:
        running, waiting = engine.submit(prompts()[0], LONG), engine.submit(prompts()[2], LONG)
        seen = next(iter(running)).tokens
        assert waiting.cancel() and waiting.result().tokens == []
        assert [new.finish_reason for new in waiting] == [FinishReason.CANCELLED]
        running.cancel()
        running.cancel()
        output = running.result()
        assert output.finish_reason == FinishReason.CANCELLED and output.tokens[: len(seen)] == seen
        expect_nothing_left(engine)


def test_result_within_a_time() -> None:
    with make_engine(max_len=1024) as engine:
        with rounds_held(engine):
            request = engine.submit(prompts()[0], LONG)
            with pytest.raises(TimeoutError, match=r"^result: request 0 goes on, expected its end within 0\.01 s$"):
                request.result(timeout=0.01)
            assert not request.done()
            request.cancel()
        assert request.result(timeout=300).finish_reason == FinishReason.CANCELLED


def test_request_callbacks() -> None:
    """Once each, before the end and after it; what one raises is logged, and harms nobody."""
    with make_engine() as engine:
        called: list[Request] = []
        heard = threading.Semaphore(0)

        def note(request: Request) -> None:
            called.append(request)
            heard.release()

        def fail(_request: Request) -> None:
            raise KeyError("mine")

        request = engine.submit(prompts()[0], SamplingParams(NEW_TOKENS))
        for callback in (note, fail, note):
            request.add_done_callback(callback)
        for _ in range(2):
            assert heard.acquire(timeout=300)
        request.add_done_callback(note)
        assert called == [request] * 3
        assert engine.submit(prompts()[0], SamplingParams(NEW_TOKENS)).result().tokens == request.result().tokens


def test_callback_may_submit_but_not_wait() -> None:
    with make_engine() as engine:
        chain: list[Request] = []
        refusals: list[str] = []
        over = threading.Event()

        def submit_another(request: Request) -> None:
            if len(chain) == 20:
                over.set()
                return
            chain.append(engine.submit(request.output.prompt_tokens + request.output.tokens, SamplingParams(2)))
            for wait in (chain[-1].result, lambda: next(iter(chain[-1])), lambda: engine.generate([1])):
                try:
                    wait()
                except RuntimeError as error:
                    refusals.append(str(error))
            chain[-1].add_done_callback(submit_another)

        first = engine.submit(prompts()[1], SamplingParams(2, ignore_eos=True))
        first.add_done_callback(submit_another)
        assert over.wait(300)
        assert len(refusals) == 60
        assert set(refusals) == {"Engine: a callback waits for a request, expected another thread to do that"}
        expect_nothing_left(engine)


# --- many at once


def test_submit_from_eight_threads(tmp_path: Path) -> None:
    """With cancels, of one's own and of others', through a pool that is too small for them."""
    folder = save_random_model(tmp_path, "llama")
    texts, kinds = random_prompts(8), [SamplingParams(count, ignore_eos=True) for count in (1, 3, 8)]
    with random_engine(folder, draft=Ngram(num_nodes=4), num_slots=12, page_size=4, num_pages=45) as engine:
        want = {(p, n): engine.generate(texts[p], kinds[n])[0].tokens for p in range(8) for n in range(3)}
        everybody: list[Request] = []

        def client(seed: int) -> int:
            rng, cancelled = random.Random(seed), 0
            for _ in range(25):
                mine = []
                for _ in range(5):
                    key = rng.randrange(8), rng.randrange(3)
                    request = engine.submit(texts[key[0]], kinds[key[1]], stream=rng.random() < 0.5)
                    mine.append((key, request))
                    everybody.append(request)
                    if rng.random() < 0.2:
                        rng.choice(everybody[-40:]).cancel()
                for key, request in mine:
                    tokens = [token for new in request for token in new.tokens] if rng.random() < 0.5 else None
                    output = request.result(timeout=300)
                    assert tokens is None or tokens == output.tokens
                    if output.finish_reason == FinishReason.CANCELLED:
                        cancelled += 1
                        assert output.tokens == want[key][: len(output.tokens)]
                    else:
                        assert output.tokens == want[key] and output.finish_reason == FinishReason.LENGTH
            return cancelled

        with ThreadPoolExecutor(8) as pool:
            cancelled = sum(pool.map(client, range(8)))
        assert len(everybody) == 1000 and 10 < cancelled < 400
        assert len({request.id for request in everybody}) == 1000
        expect_nothing_left(engine)


def test_request_ends_at_timeout() -> None:
    """By a reason that says so, with what came until then: in `generate`, in `result` and in an iteration."""
    with make_engine(max_len=2048, num_slots=2) as engine:
        (plain,) = engine.generate(prompts()[0], SamplingParams(300, ignore_eos=True))
        late, never = SamplingParams(1900, ignore_eos=True, timeout=0.03), SamplingParams(4, timeout=1e-9)
        outputs = engine.generate([prompts()[0]] * 3, [never, late, SamplingParams(4, timeout=1e9)])
        assert [o.finish_reason for o in outputs] == [FinishReason.TIMEOUT] * 2 + [FinishReason.LENGTH]
        assert not outputs[0].tokens and outputs[0].text == "" and outputs[2].tokens == plain.tokens[:4]
        for output in (outputs[1], engine.submit(prompts()[0], late).result()):
            assert output.finish_reason == FinishReason.TIMEOUT and len(output.tokens) < 1900
            assert output.tokens[:300] == plain.tokens[: len(output.tokens)]
        *_, last = engine.submit(prompts()[0], late)
        assert last.finish_reason == FinishReason.TIMEOUT
        expect_nothing_left(engine)


def test_priorities_order_those_who_wait() -> None:
    with make_engine(num_slots=1, adaptive=False) as engine:
        ended: list[int] = []
        running = engine.submit(prompts()[0], SamplingParams(100, ignore_eos=True, priority=9))
        next(iter(running))
        each = [SamplingParams(2, priority=priority) for priority in (3, 0, 3, -1, 0)]
        with rounds_held(engine):
            requests = engine.submit_many(prompts()[:5], each)
            for request in requests:
                request.add_done_callback(lambda request: ended.append(request.output.index))
        for request in [running, *requests]:
            request.result()
        assert ended == [3, 1, 4, 0, 2] and len(running.output.tokens) == 100
        expect_nothing_left(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": -1}, "SamplingParams: client is -1, expected 0 to 2147483647"),
        ({"priority": 2**31}, "SamplingParams: priority is 2147483648, expected -2147483648 to 2147483647"),
        ({"timeout": 0}, "SamplingParams: timeout is 0, expected seconds above 0, or None"),
        ({"timeout": math.inf}, "SamplingParams: timeout is inf, expected seconds above 0, or None"),
    ],
)
def test_sampling_params_refuse_bad_priority_or_timeout(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert str(error.value) == message


def test_generates_from_threads() -> None:
    """Each with its own texts, parameters and callback."""
    with make_engine("union", num_slots=5) as engine:
        want = [o.tokens for o in engine.generate(prompts(), params())]

        def run(seed: int) -> None:
            order = random.Random(seed).sample(range(8), 8)
            heard: dict[int, list[int]] = {}
            outputs = engine.generate(
                [prompts()[i] for i in order],
                [params()[i] for i in order],
                on_tokens=lambda new: heard.setdefault(new.index, []).extend(new.tokens),
            )
            assert [o.tokens for o in outputs] == [want[i] for i in order]
            assert [heard[o.index] for o in outputs] == [o.tokens for o in outputs]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(8)))
        expect_nothing_left(engine)


def test_unread_stream_costs_its_tokens_alone() -> None:
    """No objects are kept of rounds that nobody looks at."""
    with make_engine("none", max_len=1024, num_slots=2) as engine:
        request = engine.submit([1], SamplingParams(400, ignore_eos=True))
        request.result()
        assert request.num_chunks == 400
        held = [value for value in gc.get_referents(request.__dict__) if not isinstance(value, type(engine))]
        sizes = sum(sys.getsizeof(value) for value in held)
        assert sizes < 4000 + 8 * 400 + sys.getsizeof(request.output.tokens)


# --- errors


def test_request_error_is_its_own_alone(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "plain", "llama")
    texts = random_prompts(6)
    with random_engine(folder) as whole:
        want = [o.tokens for o in whole.generate(texts, SamplingParams(8))]
    poison = next(token for token in range(VOCAB) if not any(token in text for text in texts + want))
    with random_engine(poisoned_folder(folder, tmp_path / "poisoned", poison)) as engine:
        bad = engine.submit([1, poison, 2], SamplingParams(8))
        good = [engine.submit(text, SamplingParams(8)) for text in texts]
        with pytest.raises(GenerationError, match=r"^result: request 0 ended with BAD_LOGITS$") as error:
            bad.result()
        assert error.value.outputs == [bad.output] and bad.output.finish_reason == FinishReason.ERROR
        with pytest.raises(GenerationError, match="ended with BAD_LOGITS"):
            list(bad)
        assert [request.result().tokens for request in good] == want
        expect_nothing_left(engine)


def test_executor_exception_ends_requests_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        begin = engine.core.executor.begin

        def fail(slot: int, request: Any) -> None:
            begin(slot, request)
            if len(request.tokens) == 60:
                raise MemoryError("no room")

        monkeypatch.setattr(engine.core.executor, "begin", fail)
        requests = [engine.submit(prompt, SamplingParams(8)) for prompt in prompts()]
        for prompt, request in zip(prompts(), requests, strict=True):
            if len(prompt) == 60:
                with pytest.raises(MemoryError, match="no room"):
                    request.result()
                with pytest.raises(MemoryError, match="no room"):
                    list(request)
            else:
                assert request.result().finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        expect_nothing_left(engine)


def test_what_a_request_makes_of_its_results_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for stop strings fails for one of three; and so does the end of another."""
    from specdec_kernels.engine.text.stop_strings import StopStrings

    def fail(_strings: StopStrings, _tokens: list[int]) -> None:
        raise ZeroDivisionError("in the tokenizer")

    monkeypatch.setattr(StopStrings, "find", fail)
    with make_engine() as engine:
        (want,) = engine.generate(prompts()[0], SamplingParams(8))
        many = engine.submit(prompts()[0], SamplingParams(100, stop="x", ignore_eos=True))
        one = engine.submit(prompts()[0], SamplingParams(1, stop="x"))
        assert engine.submit(prompts()[0], SamplingParams(8)).result().tokens == want.tokens
        for request in (many, one):
            with pytest.raises(ZeroDivisionError, match="in the tokenizer"):
                request.result()
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts(), SamplingParams(100, stop="x"))
        expect_nothing_left(engine)


def test_request_delivery_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody waits for ever."""
    engine = make_engine(max_len=1024)
    request = engine.submit(prompts()[0], LONG)
    next(iter(request))

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.core.threads, "_deliver", fail)
    with pytest.raises(MemoryError, match="no room"):
        request.result(timeout=300)
    with pytest.raises(RuntimeError, match=r"^Engine is closed, expected an open one$"):
        engine.submit([1])
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "submit: prompt is empty, expected at least 1 token"),
        ([1] * 160, "submit: prompt has 160 tokens, expected at most 159 (max_len - 1)"),
        ([-1], "submit: prompt has token -1, expected 0 to 2047 (the model's vocabulary)"),
        ([1.5], "submit: prompt is a list with a float in it, expected text or a list of token ids"),
        (None, "submit: prompt is a NoneType, expected text or a list of token ids"),
    ],
)
def test_submit_refuses_bad_prompts(prompt: Any, message: str) -> None:
    with make_engine() as engine:
        with pytest.raises((ValueError, TypeError)) as error:
            engine.submit(prompt)
        assert str(error.value) == message
        with pytest.raises(ValueError, match="SamplingParams: stop_token_ids has 17 entries, expected at most 16"):
            engine.submit([1], SamplingParams(stop_token_ids=range(17)))
        assert not engine.core.threads.threads, "nothing has started"


@pytest.mark.parametrize(
    ("given", "sampling", "message"),
    [
        ([[1], [], [2]], None, "submit_many: prompts[1] is empty, expected at least 1 token"),
        ([[1], [2], "x", [2048]], None, "submit_many: prompts[3] has token 2048, expected 0 to 2047 (the model's vocabulary)"),
        ([[1], [2.5]], None, "submit_many: prompts[1] is a list with a float in it, expected text or a list of token ids"),
        ([[1], None], None, "submit_many: prompts[1] is a NoneType, expected text or a list of token ids"),
        (5, None, "submit_many: prompts is a int, expected text, token ids, or a list of them"),
        ([[1], [2]], [SamplingParams(), 3], "submit_many: params[1] is a int, expected SamplingParams"),
        ([[1], [2]], [SamplingParams()], "submit_many: params has 1 entries, expected one, or 2 like prompts"),
        (
            [[1], [2], [3]],
            [SamplingParams(), SamplingParams(stop_token_ids=range(17)), SamplingParams()],
            "SamplingParams: stop_token_ids has 17 entries, expected at most 16",
        ),
    ],
)  # fmt: skip
def test_one_that_is_refused_starts_none(given: Any, sampling: Any, message: str) -> None:
    with make_engine() as engine:
        with pytest.raises((ValueError, TypeError)) as error:
            engine.submit_many(given, sampling)
        assert str(error.value) == message
        with pytest.raises((ValueError, TypeError)) as error:
            engine.generate(given, sampling)
        assert str(error.value) == message.replace("submit_many", "generate")
        assert engine.submit([1], SamplingParams(1)).id == 0, "nothing has started"


@pytest.mark.parametrize("num_known", [None, 0, 3, 8])
def test_interrupt_after_submission(num_known: int | None) -> None:
    """Nobody will have the requests, which know their ids or not: they end, and the engine goes on."""

    class Ids(list[int]):
        looked_through = False

        def __iter__(self) -> Iterator[int]:
            first, self.looked_through = not self.looked_through, True
            yield from self[:num_known] if first else self[:]
            if first:
                raise KeyboardInterrupt

    class Interrupted:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def __getattr__(self, name: str) -> Any:
            return getattr(self.scheduler, name)

        def submit_many(self, submissions: Any) -> list[int]:
            ids = Ids(self.scheduler.submit_many(submissions))
            if num_known is None:
                raise KeyboardInterrupt
            return ids

    params = SamplingParams(20 if num_known is None else 100_000, ignore_eos=True)  # unknown to all, they run on
    with make_engine(max_len=1024) as engine:
        scheduler = engine.core.threads.scheduler
        engine.core.threads.scheduler = Interrupted(scheduler)  # type: ignore[assignment]
        for start in (engine.generate, engine.submit_many):
            with pytest.raises(KeyboardInterrupt):
                start(prompts(), params)
        engine.core.threads.scheduler = scheduler
        assert [len(output.tokens) for output in engine.generate(prompts(), SamplingParams(4, ignore_eos=True))] == [
            4
        ] * 8
        while scheduler.num_running or scheduler.num_waiting or engine.core.threads.num_requests:
            time.sleep(0.001)
        expect_nothing_left(engine)


# --- the end


def test_close_while_others_submit_lists() -> None:
    """All requests of a list start, or none; each that started ends."""
    for delay in (0.0, 0.002, 0.01):
        engine = make_engine("none", num_slots=3)

        def client(engine: Engine = engine) -> None:
            lists: list[list[Request]] = []
            with pytest.raises(RuntimeError, match=r"^Engine is closed, expected an open one$"):
                while True:
                    lists.append(engine.submit_many(prompts(), SamplingParams(2)))
            for requests in lists:
                assert len(requests) == 8
                assert all(request.result(300).finish_reason != FinishReason.RUNNING for request in requests)

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client) for _ in range(4)]
            time.sleep(delay)
            engine.close()
            for future in clients:
                future.result(300)
        expect_nothing_left(engine)


def test_close_cancels_what_runs() -> None:
    """From another thread than those that wait, which all come back; twice is once."""
    engine = make_engine(max_len=1024)
    with ThreadPoolExecutor(4) as pool:
        requests = [engine.submit(prompt, LONG) for prompt in prompts()]
        for request in requests[:6]:
            next(iter(request))
        waiting = [pool.submit(request.result) for request in requests[:2]]
        generating = pool.submit(engine.generate, prompts(), LONG)
        reading = pool.submit(list, requests[2])
        while engine.core.scheduler.num_waiting < 10:
            time.sleep(0.001)
        engine.close()
        engine.close()
        assert all(request.done() for request in requests)
        outputs = [future.result(300) for future in waiting] + generating.result(300)
        assert {output.finish_reason for output in outputs} == {FinishReason.CANCELLED}
        assert reading.result(300)[-1].finish_reason == FinishReason.CANCELLED
    assert not any(thread.is_alive() for thread in engine.core.threads.threads)
    for start in (lambda: engine.submit([1]), lambda: engine.generate([1])):
        with pytest.raises(RuntimeError) as error:
            start()
        assert str(error.value) == "Engine is closed, expected an open one"
    expect_nothing_left(engine)


def test_close_of_an_engine_that_did_nothing() -> None:
    with make_engine() as engine:
        pass
    engine.close()
    with pytest.raises(RuntimeError, match=r"^Engine is closed, expected an open one$"):
        engine.generate([1])


def test_close_from_a_callback() -> None:
    for by_callback in (False, True):
        engine = make_engine(max_len=1024)
        request = engine.submit(prompts()[0], LONG)
        if by_callback:
            request.add_done_callback(lambda _request, engine=engine: engine.close())
            request.cancel()
            request.result(300)
        else:
            (output,) = engine.generate(prompts()[0], LONG, on_tokens=lambda _new, engine=engine: engine.close())
            assert output.finish_reason == FinishReason.CANCELLED
        for thread in engine.core.threads.threads:
            thread.join(300)
            assert not thread.is_alive()


def test_unreferenced_engine_is_collected() -> None:
    """Its threads do not hold it, once its requests have ended and are gone, too."""
    before = threading.active_count()
    engine = make_engine()
    engine.generate(prompts(), params())
    request = engine.submit(prompts()[0])
    alive, threads = weakref.ref(engine.core), engine.core.threads.threads
    del engine
    assert request.result().tokens, "a request keeps the core of its engine"
    gc.disable()
    try:
        del request
        deadline = time.monotonic() + 300
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread that delivered the end may still hold it
        assert alive() is None
    finally:
        gc.enable()
    for thread in threads:
        thread.join(300)
    assert threading.active_count() == before


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_reaches_waiting_thread() -> None:
    """In `generate` and in `result`; the engine goes on."""
    with make_engine(max_len=1024) as engine:
        want = [o.tokens for o in engine.generate(prompts(), SamplingParams(4))]
        other = engine.submit(prompts()[3], LONG)
        next(iter(other))
        for wait in (lambda: engine.generate(prompts(), LONG), other.result):
            killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                killer.start()
                wait()
            killer.join()
            assert not other.done(), "only `generate` ends its requests"
        other.cancel()
        other.result()
        assert [o.tokens for o in engine.generate(prompts(), SamplingParams(4))] == want
        expect_nothing_left(engine)


# Each case is a process of its own, forked from one that has imported everything and made no engine yet.
CASES = """
import gc, os, sys, threading, time, weakref
weakref.finalize(gc, int)  # its exit hook is older than ours: engines are closed before it
import torch
from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.tiny import tiny_model
torch.set_num_threads(1)

def submit():
    return engine.submit([1, 2], SamplingParams(100_000, ignore_eos=True))

def idle():
    print("tokens:", len(engine.generate("import os", SamplingParams(4))[0].tokens))

def read():
    next(iter(submit()))

def wait():
    requests = [submit() for _ in range(9)]
    next(iter(requests[2]))
    keep.extend(requests)

def drop():
    global engine
    submit()
    del engine

def daemon_waits():
    threading.Thread(target=submit().result, daemon=True).start()
    time.sleep(0.1)

def daemons_submit_and_read():
    def read_on():
        try:
            while True:
                next(iter(submit()))
        except RuntimeError as error:
            assert str(error) == "Engine is closed, expected an open one"
    for _ in range(4):
        threading.Thread(target=read_on, daemon=True).start()

def at_once():
    keep.extend(submit() for _ in range(5))
    os._exit(0)

def raises():
    submit()
    raise KeyError("mine")

def others_are_waited_for():
    def short():
        time.sleep(0.2)
        print("tokens:", len(engine.submit([1, 2], SamplingParams(7, ignore_eos=True)).result().tokens))
    submit()
    threading.Thread(target=short).start()

def expect_refusal(call):
    try:
        call()
    except RuntimeError as error:
        what = "expected to be used there (this is a fork of it)"
        assert str(error) == f"Engine belongs to process {os.getppid()}, {what}", str(error)
    else:
        raise AssertionError("no error")

def fork():
    request = submit()
    next(iter(request))
    child = os.fork()
    if not child:
        for call in (submit, lambda: engine.generate([1]), request.result, lambda: list(request)):
            expect_refusal(call)
        assert not request.cancel()
        engine.close()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    seen = len(request.output.tokens)
    while len(request.output.tokens) == seen and not request.done():
        time.sleep(0.001)
    request.cancel()
    request.result()

keep = []
gc.collect()
gc.freeze()  # the end of each process would scan torch several times
for case in (idle, read, wait, drop, daemon_waits, daemons_submit_and_read, at_once, raises, others_are_waited_for, fork):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        engine = Engine(tiny_model("target"), max_len=2000, num_slots=3, device="cpu")
        case()
        break  # and the interpreter ends
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(case.__name__, code)
"""


def test_processes_end_with_requests_running() -> None:
    """Waiting readers get the error; in a fork of the engine's process, it says that a fork cannot use the engine."""
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, timeout=300)
    names = ["idle", "read", "wait", "drop", "daemon_waits", "daemons_submit_and_read", "at_once", "raises"]
    want = ["tokens: 4", *names, "tokens: 7", "others_are_waited_for", "fork"]
    codes = [f"{line} {int(line == 'raises')}" if not line.startswith("tokens") else line for line in want]
    assert done.stdout.splitlines() == codes, done.stderr
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "Fatal" in line or "terminate" in line]
    assert errors == ["KeyError: 'mine'"], done.stderr


def test_large_call_lets_later_requests_pass() -> None:
    """Half of the slots are for others while its texts wait; its own order is kept."""
    ended: list[str] = []
    with Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False) as engine:
        many = engine.submit_many([[5 + i, 6] for i in range(12)], SamplingParams(4, ignore_eos=True))
        one, two = (engine.submit([3, token], SamplingParams(4, ignore_eos=True)) for token in (7, 8))
        names = [str(i) for i in range(12)]
        for name, request in zip([*names, "one", "two"], [*many, one, two], strict=True):
            request.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
        for request in (*many, one, two):
            request.result()
    assert [name for name in ended if name.isdecimal()] == names
    assert ended.index("one") <= 4 and ended.index("two") <= 6


def test_many_calls_of_a_client_let_those_of_others_pass() -> None:
    """They queue as one large call would, and keep their order. Those of nobody keep that of arrival."""
    ended: list[str] = []
    with Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False) as engine:
        waits = []

        def submit(name: str, client: int) -> None:
            request = engine.submit([5 + len(waits), 6], SamplingParams(4, ignore_eos=True, client=client))
            request.add_done_callback(lambda _: ended.append(name))
            waits.append(request)

        with rounds_held(engine):
            for i in range(12):
                submit(str(i), client=1)
            submit("one", client=2)
            submit("two", client=3)
        for request in waits:
            request.result()
    assert [name for name in ended if name.isdecimal()] == [str(i) for i in range(12)]
    assert ended.index("one") <= 3 and ended.index("two") <= 5
