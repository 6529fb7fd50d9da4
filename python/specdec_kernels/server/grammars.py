"""Grammars of requests: tried out in a process that can be killed, then compiled in a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import Engine, SamplingParams
from ..engine.grammar_worker import MAX_ANSWER_BYTES, Answer, Job, start
from ..engine.text.source_cache import BoundedCache, num_bytes
from .protocol import RequestError

NUM_COMPILING = 2  # at a time; others wait
MAX_WAITING, MAX_WAITING_BYTES = 64, 1 << 20  # grammars, and their sources
MAX_VERDICTS, MAX_VERDICT_BYTES = 4096, 1 << 20  # remembered, and their errors
START_SECONDS, GRACE_SECONDS = 120.0, 10.0  # to start the process; for a job to end after its time


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of a request's grammar.

    Attributes:
        max_chars: of its source.
        seconds: for its compilation.
        num_bytes: of memory for its compilation.
        max_compiled_bytes: of the compiled grammar.
    """

    max_chars: int = 1 << 16
    seconds: float = 5.0
    num_bytes: int = 512 << 20
    max_compiled_bytes: int = 16 << 20


class GrammarCompiler:
    """Compiles grammars of strangers for one event loop, some at a time.

    A grammar is tried out in a child of `engine.grammar_worker`, within limits of time and memory. One that passes is
    then compiled in this process, where the engine's cache keeps it. Cancelling the task kills the child.
    """

    def __init__(self, engine: Engine, limits: GrammarLimits) -> None:
        self._inputs, self._limits = engine.core.inputs, limits
        self._slots, self._threads = asyncio.Semaphore(NUM_COMPILING), asyncio.Semaphore(NUM_COMPILING)
        self._starting: asyncio.Task[socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: BoundedCache[bytes, str] = BoundedCache(MAX_VERDICTS, MAX_VERDICT_BYTES)  # "" or an error
        self._deadlines: dict[object, float] = {}
        self._num_waiting = self._waiting_bytes = 0

    async def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of a request, if it has one, so that its submission finds it.

        Raises:
            ValueError: the grammar is invalid, or beyond the limits; a backend is not installed.
            RequestError: too many others wait; the process has ended.
        """
        if not self._inputs.has_grammar(params):
            return
        kind, source = params.constraint
        self._inputs.grammars.expect_available(kind)
        limits = self._limits
        if len(source) > limits.max_chars:
            expected = f"expected at most {limits.max_chars}"
            raise ValueError(f"SamplingParams: {kind} has {len(source)} characters, {expected}")
        size = num_bytes(source)
        if self._num_waiting >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            message = f"{self._num_waiting} grammars wait to be compiled, expected fewer: try again later"
            raise RequestError(message, status=429, code="queue_full", headers={"Retry-After": "1"})
        digest = hashlib.sha256(f"{kind} {source}".encode()).digest()
        self._num_waiting += 1
        self._waiting_bytes += size
        try:
            async with self._slots:
                if (known := self._verdicts.find(digest)) is not None:
                    verdict = known[0]
                else:
                    verdict = await self._try_out(kind, source)
                    self._verdicts.put(digest, verdict, num_bytes(verdict))
        finally:
            self._num_waiting -= 1
            self._waiting_bytes -= size
        if verdict:
            raise ValueError(verdict)
        await self._in_thread(lambda: self._inputs.compile_grammars([params]))

    async def _try_out(self, kind: str, source: str) -> str:
        """Return "" if a grammar compiles within the limits, else why not."""
        limits = self._limits
        key = object()
        self._deadlines[key] = time.monotonic() + START_SECONDS + GRACE_SECONDS
        ours, theirs = socket.socketpair()
        try:
            with ours:
                ours.setblocking(False)
                with theirs:
                    control = await asyncio.shield(self.start())
                    self._deadlines[key] = time.monotonic() + limits.seconds + GRACE_SECONDS
                    socket.send_fds(control, [b"j"], [theirs.fileno()])
                loop = asyncio.get_running_loop()
                job = Job(kind, source, limits.seconds, limits.num_bytes, limits.max_compiled_bytes)
                await loop.sock_sendall(ours, json.dumps(asdict(job)).encode())
                ours.shutdown(socket.SHUT_WR)
                got = b""
                while len(got) < MAX_ANSWER_BYTES and (part := await loop.sock_recv(ours, MAX_ANSWER_BYTES)):
                    got += part
                answer = Answer(**json.loads(got))
        except (OSError, ValueError, TypeError, asyncio.TimeoutError) as error:
            self.close()
            message = "the process that compiles grammars has ended, expected it to run: try again"
            raise RequestError(message, status=503) from error
        finally:
            del self._deadlines[key]
        if not answer.signal:
            return answer.error
        if answer.signal == signal.SIGALRM:
            return f"SamplingParams: {kind} takes more than {limits.seconds:g} s to compile, expected a simpler one"
        name = signal.Signals(answer.signal).name
        return f"SamplingParams: {kind} ends its compiler by {name}, expected a simpler one"

    def start(self) -> asyncio.Task[socket.socket]:
        """Start the process, unless it runs; the task returns its control socket once the process is ready."""
        if self._starting is not None and self._starting.done() and self._process and self._process.poll() is not None:
            self.close()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return self._starting

    async def _start(self) -> socket.socket:
        self._process, control = start(self._inputs.grammars)
        control.setblocking(False)
        ready = asyncio.get_running_loop().sock_recv(control, 1)
        try:
            if await asyncio.wait_for(ready, START_SECONDS) != b"r":
                raise ConnectionError("the process has ended before it was ready")
        except BaseException:
            control.close()
            raise
        return control

    async def _in_thread(self, call: Callable[[], Any]) -> None:
        """Run a call in a daemon thread, which the end of the process does not wait for."""
        await self._threads.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            error: Exception | None = None
            try:
                call()
            except Exception as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, error)

        def end(error: Exception | None) -> None:
            self._threads.release()
            if done.done():  # the client has gone
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        threading.Thread(target=run, name="specdec grammar", daemon=True).start()
        await done

    @property
    def trouble(self) -> str:
        """The reason why grammars cannot be compiled, or ""."""
        late = sum(deadline < time.monotonic() for deadline in self._deadlines.values())
        return f"{late} grammars are compiled for longer than their time, expected none" if late else ""

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        elif self._starting is not None and not self._starting.exception():
            self._starting.result().close()
        self._process = self._starting = None
