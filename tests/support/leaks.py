"""Checks that an engine has given back all that requests held."""

from __future__ import annotations

import os

import torch

from specdec_kernels.engine import Engine


def expect_nothing_lost(engine: Engine) -> None:
    """Check that each page is free or cached, never both, and free once the cache is emptied."""
    expect_nothing_left(engine)
    engine.clear_cache()
    expect_nothing_left(engine)
    assert int(engine.state.all_pages.num_free) == engine.config.num_pages


def cached_pages(engine: Engine) -> list[int]:
    table = engine.state.all_pages.page_table[engine.config.num_slots :]
    return sorted(table[table >= 0].tolist())


def expect_nothing_left(engine: Engine) -> None:
    """No page, slot or request. What the prefix cache keeps is no leak: such a page is its own, once, and not free."""
    engine.core.scheduler.settle()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()  # slots are given back by a record that the device may not have come to
    pool, cached = engine.state.all_pages, cached_pages(engine)
    free = pool.free_stack[: int(pool.num_free)].tolist()
    assert sorted(free + cached) == list(range(engine.config.num_pages))
    assert pool.page_refs.nonzero().flatten().tolist() == cached and int(pool.page_refs.sum()) == len(cached)
    assert (engine.core.scheduler.num_cached_pages, engine.core.scheduler.num_shared_pages) == (len(cached), 0)
    for window in engine.state.window_pools.values():
        assert int(window.num_free) == len(window.free_stack) and not window.page_refs.any()
    assert engine.core.scheduler.num_running == engine.core.scheduler.num_waiting == 0
    assert not engine.core.threads.num_requests and not engine.state.status.any()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
