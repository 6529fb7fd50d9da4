"""The engine's two threads: one runs the scheduler's loop, the other hands out what requests gain.

The loop holds Python's lock for prefill and for who joins and leaves, not in a captured round: what a round gave goes
into an outbox in C++, and the other thread takes it from there, all that has come since it last looked. So readers of
results, a server's threads among them, never hold up the device.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..status import FinishReason
from .request import BaseRequest, Tell

if TYPE_CHECKING:
    from .._C import RequestUpdate, Scheduler

CLOSED = "Engine is closed, expected an open one"

logger = logging.getLogger(__name__)

_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Closes the loops that are left when the interpreter ends.

    Exit hooks run in reverse. That of the compiled module keeps our threads out of Python for good, so `close` has to
    wait for them before: this hook is younger, which that of `weakref.finalize` need not be.
    """
    for loop in list(_loops):
        loop.close()


class Loop:
    """Drives a scheduler from the first request on until `close`. It does not know the engine, which can be collected.

    Attributes:
        hand_out_seconds: what handing out results took so far.
        unready: why no request can be started; empty where one can.
    """

    def __init__(self, scheduler: Scheduler, stream: torch.cuda.Stream | None) -> None:
        self.hand_out_seconds = 0.0
        self._scheduler, self._stream = scheduler, stream
        self._process = os.getpid()
        self._lock = threading.RLock()  # a collection of garbage may call `close` wherever memory is taken
        self._requests: dict[int, BaseRequest] = {}  # whose last emission has not come
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.unready = ""  # why no request can start, where none can
        _loops.add(self)

    def submit(self, requests: Sequence[BaseRequest], stream: bool) -> None:
        """Starts all the requests, or none, and gives them their ids."""
        self.expect_own_process()
        submissions = [request.submission(stream) for request in requests]
        with self._lock:
            self.expect_open()
            if self.unready:
                raise RuntimeError(self.unready)
            if not self._threads:
                self._start()
            ids: list[int] = []
            try:
                ids = self._scheduler.submit_many(submissions)
                for request, request_id in zip(requests, ids, strict=True):
                    request.id = request_id
            except BaseException:  # an interrupt has come behind it: nobody will have them
                for request_id in ids:
                    self._scheduler.cancel(request_id)
                raise
            finally:
                self._requests.update((request.id, request) for request in requests if request.id >= 0)

    def awaits(self, request: BaseRequest) -> bool:
        """Whether it was started and its end is to come."""
        return request.id in self._requests and not request.done()

    def cancel(self, request_id: int) -> bool:
        return self._process == os.getpid() and self._scheduler.cancel(request_id)

    @contextmanager
    def paused(self, *, restart: bool = False, request_id: int = -1) -> Iterator[None]:
        """Within, the loop stands between two rounds, with nothing in flight: what rounds work on can be changed.

        With `restart` no request holds a slot then, and the prefix cache is empty: those that ran begin anew with the
        text that they have. With a request, it runs then, or has ended.
        """
        self.expect_to_wait()
        with self._lock:
            self.expect_open()
            if not self._threads:
                self._start()
        self._scheduler.pause(restart, request_id)
        try:
            yield
        finally:
            self._scheduler.resume()

    def shut_out(self, reason: str) -> None:
        """No request starts from here on, for this reason. RuntimeError where there are some already."""
        with self._lock:
            count = self._scheduler.num_running + self._scheduler.num_waiting
            if count:
                raise RuntimeError(
                    f"sleep: {count} requests run or wait, expected none (wait for them, or cancel them)"
                )
            self.unready = reason

    def close(self) -> None:
        """Cancels all requests, hands out what they have, and ends the threads. Nothing where that was done before."""
        if self._process != os.getpid():
            return  # the threads and the device are the parent's
        with self._lock:
            self._closed = True
        self._scheduler.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def expect_open(self) -> None:
        if self._closed:
            raise RuntimeError(CLOSED)

    def expect_own_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"Engine belongs to process {self._process}, expected to be used there (this is a fork of it)"
            )

    def expect_to_wait(self) -> None:
        """Refuses to wait where what is waited for cannot come."""
        self.expect_own_process()
        if threading.current_thread() in self._threads:
            raise RuntimeError("Engine: a callback waits for a request, expected another thread to do that")

    # --- the threads

    def _start(self) -> None:
        # As daemons: the interpreter would wait for others before it comes to close the engines that are left.
        for name, target in (("loop", self._run), ("results", self._deliver)):
            thread = threading.Thread(target=target, name=f"specdec {name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            while True:
                try:
                    return self._scheduler.run()
                except BaseException:
                    logger.exception("an exception in the engine's loop that ended no request; the loop goes on")

    def _deliver(self) -> None:
        # Nothing of a turn is kept while this waits for the next one: it could be the last to hold the engine.
        try:
            while (emissions := self._scheduler.take()) is not None:
                begin = time.perf_counter()
                self._hand_out(emissions)
                del emissions
                self.hand_out_seconds += time.perf_counter() - begin
        except BaseException as error:
            # Nobody would hear of a result any more: better to end all that wait for one.
            logger.exception("handing out results failed; the engine is closed")
            with self._lock:
                self._closed = True
            self._scheduler.stop()
            for request in self._requests.values():
                request.fail(error, gone=True)
                request.tell([request])

    def _hand_out(self, emissions: list[RequestUpdate]) -> None:
        with self._lock:  # who is about to submit has the id, and has not noted the request yet
            requests = [self._requests.get(emission[0]) for emission in emissions]
        told: dict[Tell, list[BaseRequest]] = {}
        ended: list[BaseRequest] = []
        for request, emission in zip(requests, emissions, strict=True):
            if request is None:  # an interrupt has come before it had its id
                self._scheduler.cancel(emission[0])
                continue
            is_last = emission[2] != FinishReason.RUNNING
            try:
                is_news = request.gain(*emission[1:])
            except BaseException as error:
                request.fail(error, gone=is_last)
                is_news = is_last
            if is_news:
                told.setdefault(request.tell, []).append(request)
            if is_last:
                del self._requests[request.id]
                ended.append(request)
        for tell, those in told.items():
            try:
                tell(those)
            except Exception:
                logger.exception("telling of new tokens failed")
        for request in ended:
            request.run_callbacks()
