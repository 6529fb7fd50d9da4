"""The two threads of an engine: one runs the scheduler's loop, the other delivers results to requests.

The loop holds Python's GIL for prefill and for requests that start or end, not in a captured round. Results of a round
go to an update queue in C++; the second thread takes all that has come since its last look. So readers of results, such
as the threads of a server, never delay the device.
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
from .acceptance import AcceptanceMonitor
from .request import BaseRequest, OnUpdate

if TYPE_CHECKING:
    from .._C import RequestUpdate, Scheduler

CLOSED = "Engine is closed, expected an open one"

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[EngineThreads] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close the engines that are still open when the interpreter ends.

    Exit hooks run in reverse order. The hook of the compiled module keeps our threads out of Python for good, so
    `close` must wait for them earlier. This hook is registered later than that one, which is not certain of the hook of
    `weakref.finalize`.
    """
    for threads in list(_open):
        threads.close()


class EngineThreads:
    """Drives a scheduler from the first request until `close`, without a reference to the engine.

    Attributes:
        scheduler: whose loop they run.
        threads: empty until the first request.
        emit_seconds: total time spent on delivering results.
        unready: why no request can start; empty if one can.
        acceptance: watches how many draft tokens are accepted.
    """

    def __init__(self, scheduler: Scheduler, stream: torch.cuda.Stream | None, acceptance: AcceptanceMonitor) -> None:
        self.emit_seconds = 0.0
        self.acceptance = acceptance
        self.unready = ""
        self.scheduler, self._stream = scheduler, stream
        self._process = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may call `close` at any allocation
        self._requests: dict[int, BaseRequest] = {}  # those that have not ended
        self.threads: list[threading.Thread] = []
        self._closed = False
        _open.add(self)

    def submit(self, requests: Sequence[BaseRequest], stream: bool) -> None:
        """Start all requests, or none, and set their ids."""
        self.expect_own_process()
        submissions = [request.submission(stream) for request in requests]
        with self._lock:
            self.expect_open()
            if self.unready:
                raise RuntimeError(self.unready)
            if not self.threads:
                self._start()
            ids: list[int] = []
            try:
                ids = self.scheduler.submit_many(submissions)
                for request, request_id in zip(requests, ids, strict=True):
                    request.id = request_id
            except BaseException:  # an interrupt after the submission: the caller will not have them
                for request_id in ids:
                    self.scheduler.cancel(request_id)
                raise
            finally:
                self._requests.update((request.id, request) for request in requests if request.id >= 0)

    def is_running(self, request: BaseRequest) -> bool:
        """Return whether a request was started and has not ended."""
        return request.id in self._requests and not request.done()

    def cancel(self, request_id: int) -> bool:
        """End a request after the round that runs; return False if it had ended."""
        return self._process == os.getpid() and self.scheduler.cancel(request_id)

    @contextmanager
    def paused(self, *, restart: bool = False, request_id: int = -1) -> Iterator[None]:
        """Hold the loop between two rounds, with nothing in flight, so that state of rounds can be changed.

        Args:
            restart: release all slots and empty the prefix cache first. Running requests go back to the queue with
                their tokens so far, and are prefilled again.
            request_id: wait first until this request runs or has ended.
        """
        self.expect_to_wait()
        with self._lock:
            self.expect_open()
            if not self.threads:
                self._start()
        self.scheduler.pause(restart, request_id)
        try:
            yield
        finally:
            self.scheduler.resume()

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def forget_acceptance(self) -> None:
        """Let the watch on acceptance start over, for new weights."""
        self.acceptance.forget(set(self._requests))

    def refuse_requests(self, reason: str) -> None:
        """Let no request start from now on. Raise RuntimeError if some run or wait."""
        with self._lock:
            count = self.scheduler.num_running + self.scheduler.num_waiting
            if count:
                raise RuntimeError(
                    f"sleep: {count} requests run or wait, expected none (wait for them, or cancel them)"
                )
            self.unready = reason

    def close(self) -> None:
        """Cancel all requests, deliver their outputs, and end the threads. Idempotent."""
        if self._process != os.getpid():
            return  # the threads and the device are the parent's
        with self._lock:
            self._closed = True
        self.scheduler.stop()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    def expect_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self._closed:
            raise RuntimeError(CLOSED)

    def expect_own_process(self) -> None:
        """Raise RuntimeError in a fork of the process that made the engine."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"Engine belongs to process {self._process}, expected to be used there (this is a fork of it)"
            )

    def expect_to_wait(self) -> None:
        """Raise RuntimeError where waiting would never end: in a thread of the engine, or in another process."""
        self.expect_own_process()
        if threading.current_thread() in self.threads:
            raise RuntimeError("Engine: a callback waits for a request, expected another thread to do that")

    # --- the threads

    def _start(self) -> None:
        # As daemons: the interpreter waits for other threads before it runs the hook that closes engines.
        for name, target in (("loop", self._run_loop), ("results", self._run_delivery)):
            thread = threading.Thread(target=target, name=f"specdec {name}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run_loop(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            while True:
                try:
                    return self.scheduler.run()
                except BaseException:
                    logger.exception("an exception in the engine's loop that ended no request; the loop goes on")

    def _run_delivery(self) -> None:
        # Drop the requests of a turn before waiting for the next: this could be the last reference to the engine.
        try:
            while (updates := self.scheduler.take()) is not None:
                begin = time.perf_counter()
                self._deliver(updates)
                del updates
                self.emit_seconds += time.perf_counter() - begin
        except BaseException as error:
            # No result would be delivered any more: end all requests that threads wait for.
            logger.exception("delivering results failed; the engine is closed")
            with self._lock:
                self._closed = True
            self.scheduler.stop()
            for request in self._requests.values():
                request.fail(error, released=True)
                request.on_update([request])

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        with self._lock:  # a thread in `submit` has the ids, and may not have noted the requests yet
            requests = [self._requests.get(update.request_id) for update in updates]
        updated: dict[OnUpdate, list[BaseRequest]] = {}
        ended: list[BaseRequest] = []
        for request, update in zip(requests, updates, strict=True):
            if request is None:  # an interrupt came before the request had its id
                self.scheduler.cancel(update.request_id)
                continue
            is_last = update.reason != FinishReason.RUNNING
            stats = request.output.stats
            rounds, drafted, accepted = stats.rounds, stats.drafted, stats.accepted
            try:
                has_update = request.add_update(update)
            except BaseException as error:
                request.fail(error, released=is_last)
                has_update = is_last
            self.acceptance.add(request.id, stats.rounds - rounds, stats.drafted - drafted, stats.accepted - accepted)
            if has_update:
                updated.setdefault(request.on_update, []).append(request)
            if is_last:
                del self._requests[request.id]
                ended.append(request)
        for on_update, those in updated.items():
            try:
                on_update(those)
            except Exception:
                logger.exception("an update callback failed")
        for request in ended:
            request.run_callbacks()
