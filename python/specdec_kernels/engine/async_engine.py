"""The engine for asyncio: tasks await tokens, and a cancelled task cancels its request."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..status import FinishReason
from .engine import Engine
from .inputs import single_sample
from .outputs import NewTokens, RequestOutput
from .params import SamplingParams
from .request import BaseRequest, RequestHost, RequestSpec
from .transfer.migration import ExportedRequest, params_of
from .weight_updates import Weights


class AsyncRequest(BaseRequest):
    """A request started by `AsyncEngine.submit`, for tasks of the event loop it was submitted from.

    Iterate over it with `async for`, as over a `Request` with `for`: each iteration starts with the first token. A task
    that is cancelled while it waits for the request cancels the request.
    """

    def __init__(self, host: RequestHost, spec: RequestSpec, notifier: LoopNotifier) -> None:
        super().__init__(host, spec, notifier.notify)
        self.notifier = notifier
        self._waiting: set[asyncio.Future[None]] = set()

    async def result(self) -> RequestOutput:
        """Wait for the end, and return the output; of a cancelled or timed-out request, the tokens up to then.

        Raises:
            GenerationError: the device gave up on the request.
            Exception: raised by its part of a round or of a prefill.
        """
        while not self.done():
            await wait_for_update([self])
        return self.outcome()

    def __aiter__(self) -> AsyncIterator[NewTokens]:
        return merge_streams([self])

    def add_waiting(self, future: asyncio.Future[None]) -> None:
        """Complete the future at the next update."""
        self._waiting.add(future)

    def discard_waiting(self, future: asyncio.Future[None]) -> None:
        """Forget the future."""
        self._waiting.discard(future)

    def wake(self) -> None:
        """Complete the futures of waiting tasks; called in the event loop."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)


async def merge_streams(requests: Sequence[AsyncRequest]) -> AsyncIterator[NewTokens]:
    """Iterate over the new tokens of several requests as they come, in one task.

    `NewTokens.index` and `NewTokens.sample` name the request if they were submitted together. A task that is cancelled
    while it waits cancels all of them.

    Raises:
        GenerationError, Exception: what ends one of the requests, as its own iteration would.
    """
    seen = dict.fromkeys(requests, 0)
    while seen:
        updated = [request for request, begin in seen.items() if request.num_chunks > begin]
        if not updated:
            await wait_for_update(list(seen))
        for request in updated:
            begin, end = seen[request], request.num_chunks
            new = request.chunks(begin, end)
            seen[request] = end
            if new.finish_reason:
                del seen[request]
            if new.finish_reason == FinishReason.ERROR:
                request.outcome()
            yield new


async def wait_for_update(requests: Sequence[AsyncRequest]) -> None:
    """Wait until one of the requests has an update. The event loop learns of it only while this task waits."""
    loop = asyncio.get_running_loop()
    for request in requests:
        request.host.expect_to_wait()
        if loop is not request.notifier.loop():
            raise RuntimeError(f"AsyncRequest: request {request.id} belongs to another event loop, expected that one")
    future = loop.create_future()
    for request in requests:
        request.add_waiting(future)
    try:
        await future
    except asyncio.CancelledError:
        for request in requests:
            request.cancel()
        raise
    finally:
        for request in requests:
            request.discard_waiting(future)


class LoopNotifier:
    """Notifies one event loop of updates of its requests: one call per turn, whatever their number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)

    def notify(self, requests: list[Any]) -> None:
        """Wake the tasks that wait for these requests (an `OnUpdate`); cancel requests of a loop that is gone."""
        loop = self.loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(wake_all, requests)
                return
        except RuntimeError:  # the loop is closed
            pass
        for request in requests:
            request.cancel()


def wake_all(requests: list[AsyncRequest]) -> None:
    """Wake the tasks that wait for any of the requests."""
    for request in requests:
        request.wake()


class AsyncEngine:
    """An `Engine` for asyncio, for any number of event loops at a time, each in its own thread.

    Nothing polls: the thread that delivers results notifies an event loop once a turn of all updates of its requests.
    `async with` closes the engine at the end.

    Args:
        engine: runs the requests. It can be used directly at the same time, and by several `AsyncEngine`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._notifiers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> AsyncRequest:
        """Start one request, as `Engine.submit`. Text is tokenized in another thread."""
        inputs = self.engine.core.inputs
        given = [prompt], ["submit: prompt"], add_special_tokens
        if isinstance(prompt, str):
            token_lists = await asyncio.to_thread(inputs.tokenize, *given)
        else:
            token_lists = inputs.tokenize(*given)
        one = single_sample(params)
        await self.compile_grammars([one])
        return self.submit_tokens(token_lists, [one], stream=stream)[0]

    async def submit_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> list[AsyncRequest]:
        """Start several requests together, as `Engine.submit_many`. Text is tokenized in another thread."""
        inputs = self.engine.core.inputs
        given = "submit_many", prompts, params, add_special_tokens
        if any(isinstance(prompt, str) for prompt in prompts):
            token_lists, each = await asyncio.to_thread(inputs.tokenize_all, *given)
        else:
            token_lists, each = inputs.tokenize_all(*given)
        await self.compile_grammars(each)
        return self.submit_tokens(token_lists, each, stream=stream)

    def submit_tokens(
        self, token_lists: Sequence[list[int]], params: Sequence[SamplingParams], *, stream: bool = True
    ) -> list[AsyncRequest]:
        """Start requests for checked token ids at once, without awaiting anything; call it in the event loop."""
        return self.engine.core.submit(AsyncRequest, token_lists, params, stream, self._notifier())

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> AsyncIterator[NewTokens]:
        """Submit a request and iterate over it: `async for new in engine.generate(prompt, params)`.

        The request is cancelled if the iteration ends first. (asyncio learns of a generator that was left by `break`
        only when it is collected; `contextlib.aclosing` ends it at once.)
        """
        request = await self.submit(prompt, params, add_special_tokens=add_special_tokens)
        try:
            async for new in request:
                yield new
        finally:
            request.cancel()

    async def compile_grammars(self, params: Sequence[SamplingParams]) -> None:
        """Compile the grammars of parameters in another thread, since one may take seconds; `submit` reuses them."""
        inputs = self.engine.core.inputs
        if any(map(inputs.has_grammar, params)):
            await asyncio.to_thread(inputs.compile_grammars, params)

    async def update_weights(
        self, weights: Weights | None = None, draft: Weights | Sequence[Weights | None] | None = None
    ) -> None:
        """Call `Engine.update_weights` in another thread."""
        await asyncio.to_thread(self.engine.update_weights, weights, draft)

    async def export_request(self, request: BaseRequest) -> ExportedRequest:
        """Call `Engine.export_request` in another thread."""
        return await asyncio.to_thread(self.engine.export_request, request)

    async def import_request(
        self, exported: ExportedRequest, *, stream: bool = True, trusted: bool = False
    ) -> AsyncRequest:
        """Continue a request that has left another engine, as `Engine.import_request`."""
        await self.compile_grammars([params_of(exported.values)])
        return self.engine.core.import_request(AsyncRequest, exported, stream, trusted, self._notifier())

    async def sleep(self, level: int = 1) -> None:
        """Call `Engine.sleep` in another thread."""
        await asyncio.to_thread(self.engine.sleep, level)

    async def wake(self) -> None:
        """Call `Engine.wake` in another thread."""
        await asyncio.to_thread(self.engine.wake)

    async def close(self) -> None:
        """Call `Engine.close` in another thread."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _notifier(self) -> LoopNotifier:
        loop = asyncio.get_running_loop()
        with self._lock:
            return self._notifiers.setdefault(loop, LoopNotifier(loop))
