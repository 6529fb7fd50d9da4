"""The n-gram index between threads: the GIL is released, drafts are consistent, rows are shared."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

import specdec_kernels as sd


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cycles(batch: int, **options: int) -> sd.NgramIndex:
    """Return an index; slot b's text counts up to b + 2 and starts again."""
    index = sd.NgramIndex(1 << 16, batch, 100, **options)
    for b in range(batch):
        index.insert(ints([1000 * b + i % (b + 2) for i in range(80)]), b)
    return index


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 67])
@pytest.mark.parametrize("num_threads", [2, 5])
def test_ngram_threads_draft_as_one_thread(num_threads: int, batch: int) -> None:
    alone, shared = cycles(batch), cycles(batch, num_threads=num_threads)
    lens = torch.zeros(batch, dtype=torch.int32)
    for _ in range(20):
        want, got = alone.draft(None, lens, 16), shared.draft(None, lens, 16)
        for field, other in zip((*want[0], *want[1:]), (*got[0], *got[1:]), strict=True):
            assert torch.equal(field, other)
    assert shared.statistics == alone.statistics


@pytest.mark.parametrize("max_tokens", [1, 3000, 100_000])
@pytest.mark.parametrize("num_threads", [2, 5])
def test_ngram_threads_insert_as_one_thread(num_threads: int, max_tokens: int) -> None:
    """Documents and streams, starting anywhere in a block; ring and table hold them or are too small."""
    torch.manual_seed(max_tokens)
    one, many = (sd.NgramIndex(max_tokens, 2, 10**6, num_threads=n) for n in (1, num_threads))
    for size, slot, group in ((20_000, None, 0), (5, 1, 0), (1025, 1, 0), (8192, 1, 0), (8193, None, 3), (513, 0, 0)):
        text = (torch.rand(size) ** 3 * 300).int()
        for index in (one, many):
            index.insert(text, slot, group=group)
        assert one._index.digest() == many._index.digest() and one.statistics == many.statistics
        for fields in zip(*(index.draft(None, ints([5, 6]), 16)[0] for index in (one, many)), strict=True):
            assert torch.equal(*fields)


def test_ngram_drafts_run_during_a_long_insert() -> None:
    """Two threads draft; one of them finds the pool's workers busy."""
    index = cycles(32, num_threads=2)
    lens = torch.zeros(32, dtype=torch.int32)
    done = threading.Event()
    drafted, wrong = [0, 0], []

    def look(who: int) -> None:
        while not done.is_set():
            tree, _, _ = index.draft(None, lens, 4)
            drafted[who] += 1
            for b in range(32):
                first = int(tree.tokens[b, 0])
                if first // 1000 != b or tree.num_nodes[b] < 1:
                    wrong.append((b, first))

    threads = [threading.Thread(target=look, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    before = list(drafted)
    text = torch.randint(10**6, 2 * 10**6, (1 << 20,), dtype=torch.int32)
    for _ in range(4):
        index.insert(text)
    during = [after - b for after, b in zip(drafted, before, strict=True)]
    done.set()
    for thread in threads:
        thread.join()
    assert min(during) > 0 and not wrong
    assert index.statistics.inserted == 32 * 80 + 4 * (1 << 20)


def test_ngram_writers_of_several_threads_do_not_interfere() -> None:
    index = sd.NgramIndex(1 << 14, 4, 10**6)
    lens = torch.zeros(4, dtype=torch.int32)

    def write(slot: int) -> None:
        for turn in range(300):
            index.insert(torch.arange(50, dtype=torch.int32), slot)
            index.insert(torch.arange(50, dtype=torch.int32), group=slot)
            index.draft(None, lens, 8)
            if turn % 50 == 49:
                index.begin(slot, group=slot, request=turn)
            if turn % 100 == 99:
                index.clear()

    threads = [threading.Thread(target=write, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    index.clear()
    assert index._index.digest() == sd.NgramIndex(1 << 14, 4, 1)._index.digest()


def _write_in_child(index: sd.NgramIndex, results: multiprocessing.Queue[int]) -> None:
    """Write as the parent does, in a process that has none of the parent's other threads."""
    index.insert(torch.arange(100, dtype=torch.int32))
    index.begin(0, group=7)
    index.insert(torch.tensor([30, 31, 32], dtype=torch.int32), 0)
    results.put(
        int(index.draft(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 3)[0].tokens[0, 1])
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_ngram_child_forked_during_a_write_goes_on(num_threads: int) -> None:
    index = sd.NgramIndex(1 << 20, 4, num_threads=num_threads)
    text, ends = torch.arange(50, 250_000, dtype=torch.int32), threading.Event()

    def write() -> None:
        while not ends.is_set():
            index.insert(text)

    writer = threading.Thread(target=write)
    writer.start()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    try:
        for _ in range(5):
            child = context.Process(target=_write_in_child, args=(index, results))
            child.start()
            assert results.get(timeout=300) == 33
            child.join(timeout=300)
            assert child.exitcode == 0
    finally:
        ends.set()
        writer.join()


def _draft_in_child(index: sd.NgramIndex, results: multiprocessing.Queue[list[int]]) -> None:
    results.put(index.draft(None, torch.zeros(16, dtype=torch.int32), 3)[0].num_nodes.tolist())
    del index


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ngram_forked_child_works_without_pool_threads() -> None:
    index = cycles(16, num_threads=3)
    want = index.draft(None, torch.zeros(16, dtype=torch.int32), 3)[0].num_nodes.tolist()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_draft_in_child, args=(index, results))
    child.start()
    assert results.get(timeout=300) == want
    child.join(timeout=300)
    assert child.exitcode == 0
