"""The engine for asyncio: waiting for tokens is awaiting them, and a cancelled task cancels its request."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..status import FinishReason
from .engine import Engine, one_sample
from .outputs import NewTokens, RequestOutput
from .params import SamplingParams
from .request import BaseRequest, Order
from .transfer.migration import ExportedRequest, params_of
from .weight_updates import Weights


class AsyncRequest(BaseRequest):
    """A request that `AsyncEngine.submit` has started, for tasks of the event loop it was submitted from.

    Iterate over it with `async for` as over a `Request` with `for`: every iteration begins with the first token.
    A task that is cancelled while it waits for it cancels the request.
    """

    def __init__(self, engine: Engine, order: Order, inbox: Inbox) -> None:
        super().__init__(engine, order, inbox.tell)
        self._inbox = inbox
        self._waiting: set[asyncio.Future[None]] = set()

    async def result(self) -> RequestOutput:
        """Its output once it has ended; of one that was cancelled, or out of its time, what came until then.

        Raises:
            GenerationError: the device gave up on it.
            Exception: what its part of a round, or of a prefill, has raised.
        """
        while not self.done():
            await news([self])
        return self.outcome()

    def __aiter__(self) -> AsyncIterator[NewTokens]:
        return merged([self])

    def wake(self) -> None:
        """In the event loop: those who wait look again."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)


async def merged(requests: Sequence[AsyncRequest]) -> AsyncIterator[NewTokens]:
    """What any of several requests gains, as it comes: an iteration over all of them, in one task.

    `NewTokens.index` says whose it is, where they were submitted together. A task that is cancelled while it waits
    cancels them all.

    Raises:
        GenerationError, Exception: what ends one of them, as its own iteration would.
    """
    seen = dict.fromkeys(requests, 0)
    while seen:
        gained = [request for request, begin in seen.items() if request.num_pieces > begin]
        if not gained:
            await news(list(seen))
        for request in gained:
            begin, end = seen[request], request.num_pieces
            new = request.pieces(begin, end)
            seen[request] = end
            if new.finish_reason:
                del seen[request]
            if new.finish_reason == FinishReason.ERROR:
                request.outcome()
            yield new


async def news(requests: Sequence[AsyncRequest]) -> None:
    """Returns when one of them has gained something, of which the event loop hears once this task waits."""
    loop = asyncio.get_running_loop()
    for request in requests:
        request._engine._loop.expect_to_wait()
        if loop is not request._inbox.loop():
            raise RuntimeError(f"AsyncRequest: request {request.id} belongs to another event loop, expected that one")
    future = loop.create_future()
    for request in requests:
        request._waiting.add(future)
    try:
        await future
    except asyncio.CancelledError:
        for request in requests:
            request.cancel()
        raise
    finally:
        for request in requests:
            request._waiting.discard(future)


class Inbox:
    """Tells one event loop of its requests: one call of it a turn, whatever their number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)

    def tell(self, requests: list[Any]) -> None:
        loop = self.loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(wake_all, requests)
                return
        except RuntimeError:  # it is closed
            pass
        for request in requests:
            request.cancel()  # nobody is left to read it


def wake_all(requests: list[AsyncRequest]) -> None:
    for request in requests:
        request.wake()


class AsyncEngine:
    """An `Engine` for asyncio, for any number of event loops at a time, each in its thread.

    It polls nothing: the thread that hands out results tells an event loop once a turn of all that its requests gained.
    `async with` closes the engine in the end.

    Args:
        engine: what runs the requests. It can be used beside this, and by more than one of these.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> AsyncRequest:
        """As `Engine.submit`. Text becomes tokens in another thread, for the event loop has other things to do."""
        given = [prompt], ["submit: prompt"], add_special_tokens
        if isinstance(prompt, str):
            token_lists = await asyncio.to_thread(self.engine._tokens, *given)
        else:
            token_lists = self.engine._tokens(*given)
        one = one_sample(params)
        await self._compile([one])
        return self.engine._submit(AsyncRequest, token_lists, [one], stream, self._inbox())[0]

    async def submit_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> list[AsyncRequest]:
        """As `Engine.submit_many`. Text becomes tokens in another thread."""
        given = "submit_many", prompts, params, add_special_tokens
        if any(isinstance(prompt, str) for prompt in prompts):
            token_lists, each = await asyncio.to_thread(self.engine._checked, *given)
        else:
            token_lists, each = self.engine._checked(*given)
        await self._compile(each)
        return self.engine._submit(AsyncRequest, token_lists, each, stream, self._inbox())

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> AsyncIterator[NewTokens]:
        """Submits a request and iterates over it: `async for new in engine.generate(prompt, params)`.

        The request is cancelled where the iteration ends before it does. (Of a generator that was left by `break`
        asyncio learns when it is collected; `contextlib.aclosing` ends it there and then.)
        """
        request = await self.submit(prompt, params, add_special_tokens=add_special_tokens)
        try:
            async for new in request:
                yield new
        finally:
            request.cancel()

    async def _compile(self, each: Sequence[SamplingParams]) -> None:
        """Grammars in another thread, which may take a second; then they are there."""
        for one in each:
            if one.constraint[0] and self.engine.config.grammars:
                await asyncio.to_thread(self.engine._grammars.compiled, one)

    async def update_weights(
        self, weights: Weights | None = None, draft: Weights | Sequence[Weights | None] | None = None
    ) -> None:
        """`Engine.update_weights`, in another thread."""
        await asyncio.to_thread(self.engine.update_weights, weights, draft)

    async def export_request(self, request: BaseRequest) -> ExportedRequest:
        """`Engine.export_request`, in another thread."""
        return await asyncio.to_thread(self.engine.export_request, request)

    async def import_request(self, exported: ExportedRequest, *, stream: bool = True) -> AsyncRequest:
        """As `Engine.import_request`."""
        await self._compile([params_of(exported.values)])
        return self.engine._import(AsyncRequest, exported, stream, self._inbox())

    async def sleep(self, level: int = 1) -> None:
        """`Engine.sleep`, in another thread."""
        await asyncio.to_thread(self.engine.sleep, level)

    async def wake(self) -> None:
        """`Engine.wake`, in another thread."""
        await asyncio.to_thread(self.engine.wake)

    async def close(self) -> None:
        """Closes the engine: `Engine.close`, in another thread."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _inbox(self) -> Inbox:
        loop = asyncio.get_running_loop()
        with self._lock:
            return self._inboxes.setdefault(loop, Inbox(loop))
