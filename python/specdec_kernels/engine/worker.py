"""The process of a rank that rank 0 has started, with its work on stdin (`parallel.launch`)."""

from __future__ import annotations

import os
import pickle
import signal
import sys


def main() -> None:
    """Serve as a rank until rank 0 closes; exit with 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    joining = pickle.load(sys.stdin.buffer)
    if os.getppid() != joining.parent:
        sys.exit(1)

    from .follower import serve_rank

    try:
        serve_rank(joining)
    except BaseException:
        if os.getppid() == joining.parent:  # rank 0 says why
            sys.exit(1)
        raise
