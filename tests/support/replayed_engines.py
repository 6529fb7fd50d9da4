"""An engine with a second rank in a thread of the same process: both run all rounds of an undivided model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from specdec_kernels import _C
from specdec_kernels.engine import Draft, Engine, EngineOptions
from specdec_kernels.engine import core as core_module
from specdec_kernels.engine.device.executor import Executor
from specdec_kernels.engine.drafts.composition import close_draft
from specdec_kernels.engine.follower import Follower
from specdec_kernels.engine.loading import Loading
from specdec_kernels.engine.startup import FollowerRuntime
from specdec_kernels.models.layers.reduction import LOCAL
from specdec_kernels.models.shard import WHOLE
from specdec_kernels.parallel.launch import Place
from specdec_kernels.parallel.ranks import Ranks, fail
from specdec_kernels.tiny import tiny_model


class Replayed(NamedTuple):
    """An engine, the executor of its second rank, both ranks, and what closes them and waits until both have ended."""

    engine: Engine
    follower: Executor
    ranks: list[Ranks]
    close: Callable[[], None]


def shared_memory(sizes: _C.ReplaySizes) -> torch.Tensor:
    words = torch.zeros(sizes.bytes // 8 + 8, dtype=torch.int64)
    skipped = (-words.data_ptr() % 64) // 8
    return words[skipped:]


@contextmanager
def replayed(
    monkeypatch: pytest.MonkeyPatch, draft: Callable[[], Draft | None], capacity: int = 1 << 16, **options: Any
) -> Iterator[Replayed]:
    """Yield an engine of the tiny target with two ranks; `draft` makes the draft of each."""
    given = EngineOptions(**{"device": "cpu", "dtype": torch.float32, "tp": 2} | options)
    model = tiny_model("target")
    theirs = draft() or Draft()
    followers: list[Executor] = []
    ranks: list[Ranks] = []
    threads: list[threading.Thread] = []

    def open_ranks(loading: Loading, work: Any) -> Ranks:
        sizes = _C.ReplaySizes(**loading.channel_sizes | {"capacity": capacity})
        memory = shared_memory(sizes)
        ranks.extend(Ranks(2, WHOLE, LOCAL, _C.ReplayChannel(memory, sizes, rank)) for rank in range(2))
        # Models are loaded one after the other: transformers does not load two at a time.
        runtime = Loading.of(model, theirs, given, Place(1, 2, by_torchrun=False)).open_follower(ranks[1])
        followers.append(runtime.executor)
        threads.append(threading.Thread(target=follow, args=(runtime,), daemon=True))
        threads[0].start()
        return ranks[0]

    def follow(runtime: FollowerRuntime) -> None:
        try:
            Follower(runtime).run()
        except BaseException as error:
            fail(ranks[1].channel, error)

    with monkeypatch.context() as patch:
        patch.setattr(core_module, "open_ranks", open_ranks)
        engine = Engine(model, draft(), options=given)

    def close() -> None:
        engine.close()
        threads[0].join(60)

    try:
        yield Replayed(engine, followers[0], ranks, close)
    finally:
        close()
        close_draft(theirs)


def state_of(executor: Executor) -> dict[str, torch.Tensor]:
    """Return the tensors that rounds keep between them."""
    state, target = executor.state, executor.target
    tensors = {f"slots.{name}": getattr(state, name) for name in type(state)._fields}
    tensors |= {f"pages.{i}": part for i, part in enumerate(state.all_pages) if isinstance(part, torch.Tensor)}
    tensors |= {f"edits.{i}": part for i, part in enumerate(state.edits)}
    for i, group in enumerate(target.pools.groups):
        tensors |= {f"kv.{i}.{name}": pool for name, pool in group.named_pools.items()}
    return tensors | {"published": executor.round.rings.num_published, "applied": executor.round.rings.num_applied}
