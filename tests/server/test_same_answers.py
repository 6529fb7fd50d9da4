"""A server's answers are the same with and without speculation, whatever happens to a request.

`specdec_kernels.exactness` compares a server with each kind of draft to one that drafts nothing and has pages for all.

SPECDEC_SOAK=20000 pytest -m soak sends that many requests through small pools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, Standalone, Union
from specdec_kernels.exactness import FEATURES
from specdec_kernels.tiny import tiny_model
from support.devices import on_cuda
from support.exact_servers import check, expect_exact, side_of
from support.exhaustive import thinned
from support.leaks import expect_nothing_lost
from support.server_thread import Running, serving

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
DRAFTS: dict[str, Callable[[], Draft]] = {
    "eagle3-tree": lambda: Eagle3(HEAD, num_steps=4, topk=4, num_nodes=16),
    "ngram": lambda: Ngram(num_nodes=8),
    "union": lambda: Union(Eagle3(HEAD, num_steps=3, topk=3, num_nodes=12), Ngram(num_nodes=12), num_nodes=16),
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
}
MAX_LEN, PAGE_SIZE, NUM_SLOTS = 256, 4, 6
SMALL = -(-(MAX_LEN + 64) // PAGE_SIZE)  # pages of one long request
ROOMY = 800
SOAK = int(os.environ.get("SPECDEC_SOAK", 64))


def drafts_of(default: str) -> pytest.MarkDecorator:
    """Parametrize by draft; the default run uses one in each test."""
    return pytest.mark.parametrize("draft", thinned(DRAFTS, default.__eq__))


def make_engine(draft: Draft | None, device: torch.device, **options: Any) -> Engine:
    given = {
        "max_len": MAX_LEN,
        "num_slots": NUM_SLOTS,
        "page_size": PAGE_SIZE,
        "num_pages": ROOMY,
        "prefill_chunk": 48,
        "dtype": torch.float32,
        "device": device,
        "adaptive": False,
        "grammars": True,
    } | options
    return Engine(TARGET, draft=draft, **given)


@contextmanager
def running(engine: Engine) -> Iterator[Running]:
    with serving(engine, max_queued=100) as server:
        yield server
        server.wait_until_idle()
        expect_nothing_lost(engine)


@pytest.fixture(scope="module", params=["cpu", *on_cuda("cuda")])
def where(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def plain(where: torch.device) -> Iterator[Running]:
    with running(make_engine(None, where)) as server:
        yield server


@pytest.mark.exhaustive  # the default run speculates with preemption and a prefix cache, below
@pytest.mark.parametrize("draft", DRAFTS)
def test_server_answers_do_not_depend_on_speculation(draft: str, plain: Running, where: torch.device) -> None:
    with running(make_engine(DRAFTS[draft](), where, prefix_cache=True)) as server:
        result = check(side_of(server), side_of(plain), requests=50, seed=49, limit=1e-3)
        expect_exact(result, side_of(server))
        assert server.engine.stats().prefix_hits > 0
        assert result.counts.keys() == {*FEATURES, "chat", "completion"}


@drafts_of("standalone")
def test_server_answers_do_not_depend_on_preemption(draft: str, plain: Running, where: torch.device) -> None:
    """Running requests need more pages than there are, so that some are preempted and resume."""
    with running(make_engine(DRAFTS[draft](), where, num_pages=SMALL)) as server:
        skip = {"stop", "stop_token_ids", "short", "regex", "grammar"}
        result = check(side_of(server), side_of(plain), requests=16, seed=6, max_tokens=32, skip=skip, limit=1e-3)
        expect_exact(result, side_of(server))
        assert server.engine.stats().retractions > 0


@pytest.mark.soak
@pytest.mark.parametrize("draft", DRAFTS if "SPECDEC_SOAK" in os.environ else thinned(DRAFTS, "union".__eq__))
def test_server_answers_of_many_requests(draft: str, plain: Running, where: torch.device) -> None:
    """The pool is too small, the prefix cache is on, and the engine chooses the tree size, also 0."""
    engine = make_engine(DRAFTS[draft](), where, num_pages=SMALL, prefix_cache=True, adaptive=True)
    with running(engine) as server:
        result = check(side_of(server), side_of(plain), requests=SOAK, seed=14, max_tokens=24, concurrency=16)
        expect_exact(result, side_of(server))
        assert result.counts.keys() == {*FEATURES, "chat", "completion"}
        stats = engine.stats()
        assert stats.retractions > 0 and stats.prefix_hits > 0
