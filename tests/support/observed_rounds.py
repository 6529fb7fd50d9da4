"""What a scheduler asks of an engine's executor, noted or changed by a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from specdec_kernels import _C
from specdec_kernels.engine import Engine


class Launched(NamedTuple):
    """A round, as the scheduler asked for it; a batch of 0 only applies commands."""

    batch: int
    num_rows: int
    max_kv_len: int


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Let callers of a method call `around(method, *arguments)`, until the returned function is called."""
    method = getattr(owner, name)
    setattr(owner, name, partial(around, method))
    return lambda: setattr(owner, name, method)


def wrap_launch(engine: Engine, around: Callable[..., None]) -> Callable[[], None]:
    """Wrap the launch of rounds that are no CUDA graphs and have no constrained request."""
    return wrap_method(engine.core.executor, "launch", around)


def launches_of(engine: Engine) -> list[Launched]:
    """Return a list that gets the rounds that are no CUDA graphs, from now on."""
    launched: list[Launched] = []

    def note(call: Callable[..., None], *size: int) -> None:
        launched.append(Launched(*size))
        call(*size)

    for method in ("launch", "forward"):  # the latter for rounds with constrained requests
        wrap_method(engine.core.executor, method, note)
    return launched


def prefills_of(engine: Engine) -> list[list[_C.PrefillChunk]]:
    """Return a list that gets the chunks of each prefill pass, from now on."""
    passes: list[list[_C.PrefillChunk]] = []

    def note(call: Callable[..., None], chunks: list[_C.PrefillChunk]) -> None:
        passes.append(chunks)
        call(chunks)

    wrap_method(engine.core.executor, "prefill", note)
    return passes
