"""A limit of time for Python code that may loop for ever, such as the template of a chat."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """Raised in code that runs longer than its time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns; raise TimeLimitError if its Python code runs longer, in any thread."""
    thread = threading.get_ident()
    lock = threading.Lock()
    is_done = is_late = False

    def interrupt() -> None:
        nonlocal is_late
        with lock:
            if not is_done:
                is_late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))

    def settle() -> None:
        nonlocal is_done
        with lock:
            is_done = True
        for _ in range(
            100 if is_late else 0
        ):  # the time ended with the call: the exception comes at the next instruction
            time.sleep(0)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        result = call()
    except TimeLimitError:
        raise
    except BaseException:
        settle()
        raise
    finally:
        timer.cancel()
    settle()
    return result
