"""Settings of the Python interpreter for a serving process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Time after which a thread must hand the GIL to a waiting one; Python's default is 5 ms. After a round, the server's
# thread holds the GIL for a millisecond or two. The scheduler loop needs it at the same time, as do the threads that
# compute grammar masks for the next round while the device runs the target.
SWITCH_SECONDS = 2e-4


@contextmanager
def serving_process() -> Iterator[None]:
    """Shorten the GIL's switch interval, and exempt loaded objects from garbage collection.

    A collection that scans all of them would stop every request for a fifth of a second.
    """
    before = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
