"""Requests of asyncio tasks: texts, order, cancelled tasks, several event loops, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from specdec_kernels import FinishReason
from specdec_kernels import engine as engine_package
from specdec_kernels.engine import AsyncEngine, AsyncRequest, GenerationError, NewTokens, SamplingParams
from support.exhaustive import thinned
from support.leaks import expect_nothing_left
from support.paused_rounds import rounds_held
from support.request_engines import DRAFTS, LONG, NEW_TOKENS, make_engine, params, prompts

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    async def bounded() -> Result:
        return await asyncio.wait_for(main, 300)

    return asyncio.run(bounded())


async def pieces_of(engine: AsyncEngine, prompt: list[int], sampling: SamplingParams) -> list[NewTokens]:
    return [new async for new in engine.generate(prompt, sampling)]


@pytest.mark.parametrize("name", thinned(DRAFTS, "union".__eq__))
def test_async_texts_equal_generate(name: str) -> None:
    with make_engine(name) as plain:
        want = plain.generate(prompts(), params())

    async def main(engine: AsyncEngine) -> None:
        many = [pieces_of(engine, *pair) for pair in zip(prompts(), params(), strict=True)]
        for pieces, output in zip(await asyncio.gather(*many), want, strict=True):
            assert [token for new in pieces for token in new.tokens] == output.tokens
            assert [new.finish_reason for new in pieces[:-1]] == [FinishReason.RUNNING] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == output.finish_reason
        requests = [await engine.submit(*pair) for pair in zip(prompts(), params(), strict=True)]
        outputs = await asyncio.gather(*(request.result() for request in requests))
        assert [(o.tokens, o.text) for o in outputs] == [(o.tokens, o.text) for o in want]
        whole = [new async for new in requests[0]]
        assert len(whole) == 1 and whole[0].tokens == want[0].tokens, "who comes late has all in one piece"

    with make_engine(name) as engine:
        run(main(AsyncEngine(engine)))
        expect_nothing_left(engine)


def test_async_submit_many() -> None:
    mixed = [*prompts()[:4], "import os\n", *prompts()[5:]]

    async def main(engine: AsyncEngine) -> None:
        want = engine.engine.generate(mixed, params())
        requests = await engine.submit_many(mixed, params())
        assert [request.id for request in requests] == [*range(8, 16)]
        outputs = await asyncio.gather(*(request.result() for request in requests))
        assert [(o.index, o.tokens, o.text) for o in outputs] == [(o.index, o.tokens, o.text) for o in want]
        with pytest.raises(ValueError, match=r"^submit_many: prompts\[1\] is empty, expected at least 1 token$"):
            await engine.submit_many([[1], []])
        (other,) = await engine.submit_many([[1]], SamplingParams(1))
        assert other.id == 16, "nothing had started"
        await other.result()

    with make_engine() as engine:
        run(main(AsyncEngine(engine)))
        expect_nothing_left(engine)


def test_text_and_parameters_reach_the_engine() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            (want,) = engine.engine.generate("import os\n", SamplingParams(5))
            request = await engine.submit("import os\n", SamplingParams(5), stream=False)
            output = await request.result()
            assert (output.text, output.prompt_tokens) == (want.text, want.prompt_tokens)
            for bad in ([], ""):
                with pytest.raises(ValueError, match=r"^submit: prompt is empty, expected at least 1 token$"):
                    await engine.submit(bad)
        with pytest.raises(RuntimeError, match=r"^Engine is closed, expected an open one$"):
            await engine.submit([1])
        await engine.close()

    run(main())


def test_tasks_share_a_request() -> None:
    """Each sees every token, and the event loop has time for others meanwhile."""

    async def main(engine: AsyncEngine) -> None:
        request = await engine.submit(prompts()[0], SamplingParams(100, ignore_eos=True))
        turns = 0

        async def read() -> list[int]:
            return [token async for new in request for token in new.tokens]

        async def others() -> None:
            nonlocal turns
            while not request.done():
                turns += 1
                await asyncio.sleep(0)

        *texts, _ = await asyncio.gather(read(), read(), read(), others())
        assert texts == [(await request.result()).tokens] * 3 and turns > 10

    with make_engine() as engine:
        run(main(AsyncEngine(engine)))


@pytest.mark.parametrize("waits", ["iterates", "iterates over generate", "awaits the result"])
def test_async_task_cancel_cancels_request(waits: str) -> None:
    async def main(engine: AsyncEngine) -> None:
        other = await engine.submit(prompts()[3], LONG)
        requests: list[AsyncRequest] = []
        begun = asyncio.Event()

        async def task() -> None:
            if waits == "iterates over generate":
                async for _ in engine.generate(prompts()[0], LONG):
                    begun.set()
                return
            requests.append(await engine.submit(prompts()[0], LONG))
            if waits == "awaits the result":
                begun.set()
                await requests[0].result()
            async for _ in requests[0]:
                begun.set()

        running = asyncio.create_task(task())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for request in requests:
            assert (await request.result()).finish_reason == FinishReason.CANCELLED
        assert not other.done() and other.cancel()
        assert (await other.result()).finish_reason == FinishReason.CANCELLED

    with make_engine(max_len=1024) as engine:
        run(main(AsyncEngine(engine)))
        expect_nothing_left(engine)


def test_async_request_times_out() -> None:
    async def main(engine: AsyncEngine) -> None:
        with rounds_held(engine.engine):
            request = await engine.submit(prompts()[0], LONG)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(request.result(), 0.01)
        assert (await request.result()).finish_reason == FinishReason.CANCELLED

    with make_engine(max_len=1024) as engine:
        run(main(AsyncEngine(engine)))


def test_async_stream_closed_cancels_request() -> None:
    async def main(engine: AsyncEngine) -> None:
        async with contextlib.aclosing(engine.generate(prompts()[0], LONG)) as tokens:  # type: ignore[type-var]
            async for _ in tokens:
                break
        async for _ in engine.generate(prompts()[0], LONG):
            break
        gc.collect()
        while engine.engine.core.threads.num_requests:
            await asyncio.sleep(0.001)

    with make_engine(max_len=1024) as engine:
        run(main(AsyncEngine(engine)))
        expect_nothing_left(engine)


def test_async_error_belongs_to_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: AsyncEngine) -> None:
        good, bad = await engine.submit(prompts()[0], SamplingParams(8)), await engine.submit(prompts()[3])
        with pytest.raises(MemoryError, match="no room"):
            await bad.result()
        with pytest.raises(MemoryError, match="no room"):
            async for _ in bad:
                pass
        assert len((await good.result()).tokens) == 8
        num_free = engine.engine.state.pool.num_free
        before = int(num_free[0])
        num_free[0] = 0
        with pytest.raises(GenerationError, match=r"^result: request 2 ended with"):
            await (await engine.submit(prompts()[0])).result()
        num_free[0] = before

    with make_engine() as engine:
        begin = engine.core.executor.begin

        def fail(slot: int, request: Any) -> None:
            begin(slot, request)
            if request.tokens == prompts()[3]:
                raise MemoryError("no room")

        monkeypatch.setattr(engine.core.executor, "begin", fail)
        run(main(AsyncEngine(engine)))


def test_async_event_loops_in_threads() -> None:
    """Each with many tasks, cancels among them, beside threads that do without asyncio."""
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    with make_engine("chain", num_slots=5) as engine:
        want = [output.tokens for output in engine.generate(prompts(), sampling)]

        async def client(shared: AsyncEngine, seed: int) -> int:
            rng, cancelled = random.Random(seed), 0

            async def one(index: int) -> list[int]:
                return [token for new in await pieces_of(shared, prompts()[index], sampling) for token in new.tokens]

            async def some(index: int) -> bool:
                request = await shared.submit(prompts()[index], sampling)
                async for new in request:
                    if len(request.output.tokens) > 6 or new.finish_reason:
                        break
                request.cancel()
                tokens = (await request.result()).tokens
                assert tokens == want[index][: len(tokens)]
                return request.output.finish_reason == FinishReason.CANCELLED

            for _ in range(3):
                order = [rng.randrange(8) for _ in range(8)]
                texts = asyncio.gather(*(one(index) for index in order))
                cancelled += sum(await asyncio.gather(*(some(index) for index in order)))
                assert await texts == [want[index] for index in order]
            return cancelled

        shared = AsyncEngine(engine)
        with ThreadPoolExecutor(6) as pool:
            loops = [pool.submit(lambda seed=seed: run(client(shared, seed))) for seed in range(3)]
            threads = [pool.submit(engine.generate, prompts(), sampling) for _ in range(3)]
            assert sum(future.result() for future in loops) > 20
            assert [[o.tokens for o in future.result()] for future in threads] == [want] * 3
        expect_nothing_left(engine)


def test_async_event_loop_end_cancels_requests() -> None:
    with make_engine(max_len=1024) as engine:
        shared = AsyncEngine(engine)

        async def main() -> AsyncRequest:
            request = await shared.submit(prompts()[0], LONG)
            async for _ in request:
                return request
            raise AssertionError

        request = run(main())
        ended = threading.Event()
        request.add_done_callback(lambda _request: ended.set())
        assert ended.wait(300) and request.output.finish_reason == FinishReason.CANCELLED
        expect_nothing_left(engine)


def test_async_request_belongs_to_its_event_loop() -> None:
    with make_engine(max_len=1024) as engine:
        shared = AsyncEngine(engine)

        async def main() -> None:
            request = await shared.submit(prompts()[0], LONG)
            message = r"^AsyncRequest: request 0 belongs to another event loop, expected that one$"
            with pytest.raises(RuntimeError, match=message):
                await asyncio.to_thread(run, request.result())
            request.cancel()
            await request.result()

        run(main())


def test_async_event_loop_is_notified_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests gained something in it, and of nothing while nothing happens."""
    calls: list[int] = []
    with make_engine("none", num_slots=6) as engine:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            call = loop.call_soon_threadsafe

            def note(callback: Any, *arguments: Any) -> Any:
                if arguments:
                    calls.append(len(arguments[0]))
                return call(callback, *arguments)

            monkeypatch.setattr(loop, "call_soon_threadsafe", note)
            shared = AsyncEngine(engine)
            requests = [await shared.submit(prompt, SamplingParams(50, ignore_eos=True)) for prompt in prompts()[:6]]
            await asyncio.gather(*(request.result() for request in requests))
            await asyncio.sleep(0.05)

        run(main())
        assert sum(calls) == 6 * 50 and len(calls) <= engine.stats().rounds + 6 < 150  # and first rounds


def test_merged_warns_that_it_is_merge_streams() -> None:
    with pytest.warns(DeprecationWarning, match="merge_streams"):
        assert engine_package.merged is engine_package.merge_streams
