"""The ranks of a divided model, as one of them sees them."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import _C
from ..models.layers.reduction import Reduction
from ..models.shard import Shard


@dataclass
class Ranks:
    """One of the processes that share a model. Rank 0 decides what runs; the others make the same calls after it.

    Attributes:
        size: how many ranks there are.
        shard: this rank's share of the model. reduction: sums over the ranks.
        channel: what rank 0 records, and the others read.
        least: returns the least of the ranks' integers, on all of them.
        on_loaded: called once this rank has its models: waits for other ranks are short from then on.
        on_close: what ends the ranks, called once.
    """

    size: int
    shard: Shard
    reduction: Reduction
    channel: _C.ReplayChannel
    least: Callable[[int], int] = int
    on_loaded: Callable[[], None] = field(default=lambda: None)
    on_close: Callable[[], None] = field(default=lambda: None)
    _closed: bool = False

    @property
    def decides(self) -> bool:
        """Return whether this is rank 0."""
        return self.channel.rank == 0

    def record(self, name: str, *arguments: Any) -> None:
        """Let the other ranks make a call: the method `name` of a `Follower`.

        Raises:
            RuntimeError: a rank has failed.
        """
        self.channel.write(pickle.dumps((name, arguments), protocol=pickle.HIGHEST_PROTOCOL), name)

    def meet(self) -> None:
        """Wait until all ranks call it, since a kernel waits a few seconds only for another rank."""
        self.least(0)

    def close(self) -> None:
        """Let the other ranks end, on rank 0, and leave the group. Idempotent."""
        if not self._closed:
            self._closed = True
            if self.decides:
                self.channel.close()
            self.on_close()


def expect_alive(channel: _C.ReplayChannel) -> None:
    """Raise RuntimeError, with the reason, once a rank has failed."""
    if reason := channel.failure:
        raise RuntimeError(f"Engine: {reason}")


def fail(channel: _C.ReplayChannel, error: BaseException) -> None:
    """End all ranks for an exception of this one, unless one has failed already."""
    lines = traceback.format_exception(error)
    text = "".join(lines if channel.rank else lines[-1:]).strip()
    channel.fail_unless_others(f"rank {channel.rank}: {text}")
