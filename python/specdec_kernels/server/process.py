"""What a process that serves asks of Python itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# After so long a thread that holds Python's lock hands it on, if others wait for it; Python itself says 5 ms. When a
# round has ended the server's thread holds it for a millisecond or two, and just then others want it: the loop, and the
# threads that find out what a grammar allows in the next round, while the device runs the target over it.
SWITCH_SECONDS = 2e-4


@contextmanager
def serving_process() -> Iterator[None]:
    """While it serves. What has been loaded stays: a collection of garbage that looks through all of it stops every
    request for a fifth of a second.
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
