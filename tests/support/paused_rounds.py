"""Rounds that wait for a test, so that it finds requests running however busy the machine is."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdec_kernels.engine import Engine

LET_GO = 0.1  # seconds within which a thread that pauses the loop gets there


@contextmanager
def rounds_held(engine: Engine, after: int = 0) -> Iterator[None]:
    """Limit an engine on the CPU to this many more rounds, and one more when its loop is paused."""
    launch, paused = engine.core.executor.launch, engine.core.threads.paused
    let_go, numbers = threading.Event(), itertools.count()

    def wait(batch: int, num_rows: int, max_kv_len: int) -> None:
        if num_rows and next(numbers) >= after:
            assert let_go.wait(60)
            time.sleep(LET_GO)
        launch(batch, num_rows, max_kv_len)

    @contextmanager
    def pausing(**options: Any) -> Iterator[None]:
        let_go.set()
        with paused(**options):
            yield

    engine.core.executor.launch = wait  # type: ignore[method-assign]
    engine.core.threads.paused = pausing  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        let_go.set()
        engine.core.executor.launch, engine.core.threads.paused = launch, paused  # type: ignore[method-assign]
