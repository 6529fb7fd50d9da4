"""Rounds that wait for a test, so that it finds requests running however busy the machine is."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from specdec_kernels.engine import Engine
from support.observed_rounds import wrap_launch, wrap_method

LET_GO = 0.1  # seconds within which a thread that pauses the loop gets there


@contextmanager
def rounds_held(engine: Engine, after: int = 0) -> Iterator[None]:
    """Limit an engine on the CPU to this many more rounds, and one more when its loop is paused."""
    let_go, numbers = threading.Event(), itertools.count()

    def wait(launch: Callable[..., None], batch: int, num_rows: int, max_kv_len: int) -> None:
        if num_rows and next(numbers) >= after:
            assert let_go.wait(300)
            time.sleep(LET_GO)
        launch(batch, num_rows, max_kv_len)

    @contextmanager
    def pausing(paused: Callable[..., AbstractContextManager[None]], **options: Any) -> Iterator[None]:
        let_go.set()
        with paused(**options):
            yield

    restore = wrap_launch(engine, wait), wrap_method(engine.core.threads, "paused", pausing)
    try:
        yield
    finally:
        let_go.set()
        for each in restore:
            each()
