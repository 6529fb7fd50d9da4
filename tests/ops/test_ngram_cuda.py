"""The n-gram index on a GPU: after equal calls it has the same bytes and drafts as on the CPU."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as sd
from support.devices import HAS_CUDA

pytestmark = pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")

NUM_SLOTS = 5


class Twins:
    """One index per device; both get the same calls."""

    def __init__(self, *sizes: int) -> None:
        self.cpu, self.cuda = sd.NgramIndex(*sizes), sd.NgramIndex(*sizes, device="cuda")

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        getattr(self.cpu, name)(*arguments, **options)
        on_device = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        getattr(self.cuda, name)(*on_device, **options)

    def check(self) -> None:
        assert self.cpu._index.digest() == self.cuda._index.digest(), (self.cpu.statistics, self.cuda.statistics)
        assert self.cpu.statistics == self.cuda.statistics

    def draft(self, slots: list[int] | None, seq_lens: list[int], n: int, **options: Any) -> None:
        on_cpu = None if slots is None else ints(slots)
        want = self.cpu.draft(on_cpu, ints(seq_lens), n, **options)
        got = self.cuda.draft(None if on_cpu is None else on_cpu.cuda(), ints(seq_lens).cuda(), n, **options)
        for field, other in zip((*want[0], *want[1:]), (*got[0], *got[1:]), strict=True):
            assert torch.equal(field, other.cpu()), (options, field, other)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def text_of(rng: random.Random, alphabet: int, size: int) -> list[int]:
    """Return runs of a few source texts, so that long matches occur."""
    source = random.Random(rng.randrange(4))
    return [source.randrange(alphabet) if rng.random() < 0.97 else rng.randrange(alphabet) for _ in range(size)]


def random_draft(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": rng.choice(["tree", "tree", "chain"])}
    if rng.random() < 0.4:
        options |= {
            "min_prob": rng.choice([0.0, 0.05, 0.3, 1.0]),
            "min_match": rng.choice([0, 1, 2, 5, 32]),
            "own_weight": rng.choice([0.0, 1.0, 4.0, 256.0]),
            "group_weight": rng.choice([0.0, 1.0, 2.5]),
            "global_weight": rng.choice([0.0, 1.0, 0.5]),
            "recency": rng.choice([1.0, 0.75, 0.01]),
        }
    return options


def random_calls(rng: random.Random, twins: Twins, alphabet: int, calls: int, longest: int) -> Twins:
    for _ in range(calls):
        action, slot = rng.random(), rng.randrange(NUM_SLOTS)
        if action < 0.05:
            twins.call("release", slot)
        elif action < 0.2:
            request = rng.choice([None, 1, 2])
            twins.call("begin", slot, group=rng.randrange(3), private=rng.random() < 0.3, request=request)
        elif action < 0.4:
            tokens = ints(text_of(rng, alphabet, rng.choice([0, 1, 2, 5, 26, 27, 28, 54, 100, longest])))
            if rng.random() < 0.5:
                twins.call("insert", tokens, group=rng.randrange(3))
            else:
                twins.call("insert", tokens, slot)
        elif action < 0.45:
            held = twins.cpu.length(slot)
            start = rng.randrange(held + 1)
            twins.call("insert", ints(text_of(rng, alphabet, rng.choice([0, 3, 40, 120]))), slot, start=start)
        elif action < 0.75:
            batch, width = rng.randrange(1, NUM_SLOTS + 2), rng.choice([1, 4, 17, 40])
            slots = rng.sample([*range(NUM_SLOTS), -1], batch)
            if rng.random() < 0.1:
                slots[-1] = slots[0]  # twice
            lengths = [rng.randrange(width + 1) for _ in slots]
            rows = [text_of(rng, alphabet, n) + [-7] * (width - n) for n in lengths]
            matches = ints([rng.randrange(33) for _ in slots]) if rng.random() < 0.5 else None
            twins.call("extend", ints(rows).reshape(batch, width), ints(lengths), ints(slots), matches)
        elif action < 0.77:
            with tempfile.TemporaryDirectory() as folder:
                cpu, cuda = Path(folder) / "cpu", Path(folder) / "cuda"
                twins.cpu.save(cpu)
                twins.cuda.save(cuda)
                assert cpu.read_bytes() == cuda.read_bytes()
                twins.cpu, twins.cuda = sd.NgramIndex.load(cuda), sd.NgramIndex.load(cpu, device="cuda")
        elif action < 0.78:
            twins.call("clear")
        else:
            slots = [rng.randrange(-1, NUM_SLOTS + 1) for _ in range(rng.randrange(1, 8))]
            n = rng.choice([1, 2, 7, 16, 17, 64, 65, 256])
            twins.draft(slots, [rng.randrange(1000) for _ in slots], n, **random_draft(rng))
        if rng.random() < 0.3:
            twins.check()
    twins.check()
    return twins


@pytest.mark.parametrize("alphabet", [1, 2, 5, 50])
@pytest.mark.parametrize("max_tokens", [1, 30, 200, 3000, 60_000])
def test_ngram_cuda_index_equals_cpu_index(max_tokens: int, alphabet: int) -> None:
    for seed in range(3):
        rng = random.Random(f"{max_tokens} {alphabet} {seed}")
        random_calls(rng, Twins(max_tokens, NUM_SLOTS, 10**6), alphabet, 60, longest=1500)


@pytest.mark.sanitize
def test_ngram_cuda_index_equals_cpu_index_after_few_calls() -> None:
    random_calls(random.Random(1), Twins(300, NUM_SLOTS, 10**6), 3, 40, longest=200)
    random_calls(random.Random(2), Twins(20_000, NUM_SLOTS, 10**6), 3, 40, longest=200)


@pytest.mark.parametrize("vocab", [1, 20, 30_000])
def test_ngram_cuda_bulk_insert_in_pieces_equals_cpu(vocab: int) -> None:
    """The text exceeds one launch, in rings that hold it and that do not; then slots continue from the middle."""
    torch.manual_seed(vocab)
    text = (torch.rand(150_001) ** 3 * vocab).int()
    for max_tokens in (100_000, 400_000):
        twins = Twins(max_tokens, 2, 10**6)
        twins.call("insert", text)
        twins.check()
        twins.call("insert", text[:1000].contiguous(), 1)
        twins.call("insert", text[:140_000].contiguous(), 1, start=0)
        twins.check()
        twins.draft([0, 1], [1, 2], 32)


@pytest.mark.parametrize("batch", [1, 37, 128, 1500])
def test_ngram_cuda_rounds_of_many_rows_equal_cpu(batch: int) -> None:
    rng = random.Random(batch)
    twins = Twins(60 * batch, batch, 1000)
    for b in range(batch):
        twins.call("begin", b, group=b % 3, private=b % 5 == 0)
    for width in (1, 16, 16, 3, 64):
        slots = rng.sample(range(batch), batch)
        lengths = [rng.randrange(min(width, 12) + 1) for _ in slots]
        rows = [text_of(rng, 3, n) + [0] * (width - n) for n in lengths]
        twins.call("extend", ints(rows), ints(lengths), ints(slots), ints([rng.randrange(33) for _ in slots]))
        twins.check()
        twins.draft(slots, [7] * batch, 16)
        twins.draft(None, [7] * batch, 16, mode="chain")


def test_ngram_cuda_round_in_a_graph_equals_cpu() -> None:
    """Each replay drafts, then appends the continuation of the text."""
    text = torch.tensor(text_of(random.Random(1), 6, 4000), dtype=torch.int32)
    twins = Twins(20_000, 4, 5000)
    twins.call("insert", text)
    slots, seq_lens, width = ints([2, 0, 3, -1]), ints([5, 6, 7, 8]), 6
    for slot in range(4):
        twins.call("begin", slot)
        twins.call("insert", text[100 * slot : 100 * slot + 50].contiguous(), slot)
    on = [t.cuda() for t in (slots, seq_lens, torch.zeros(4, width, dtype=torch.int32), torch.zeros(4).int())]
    out: sd.NgramDraft | None = None

    def round_() -> None:
        nonlocal out
        out = twins.cuda.draft(on[0], on[1], 20, out=out)
        twins.cuda.extend(on[2], on[3], on[0], out.match_len)

    round_()
    twins.cpu.draft(slots, seq_lens, 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_()
    rng = random.Random(4)
    for _ in range(30):
        lengths = ints([rng.randrange(width + 1) for _ in range(4)])
        rows = text[rng.randrange(3000) :][: 4 * width].reshape(4, width).contiguous()
        on[2].copy_(rows)
        on[3].copy_(lengths)
        want = twins.cpu.draft(slots, seq_lens, 20)
        twins.cpu.extend(rows, lengths, slots, want.match_len)
        graph.replay()
        for field, other in zip((*want.tree, *want[1:]), (*out.tree, *out[1:]), strict=True):
            assert torch.equal(field, other.cpu())
    twins.check()


def test_ngram_cuda_refused_calls_add_nothing() -> None:
    twins = Twins(1000, 3, 20)
    for slot in range(3):
        twins.call("insert", ints([1, 2, 3, 1, 2]), slot)
    digest, index = twins.cpu._index.digest(), twins.cuda

    def extend(rows: list[list[int]], lengths: list[int], matches: list[int] | None = None) -> None:
        index.extend(ints(rows).cuda(), ints(lengths).cuda(), None, None if matches is None else ints(matches).cuda())

    extend([[5, -1], [5, 6], [5, 6]], [2, -1, 3])
    extend([[5, 6]], [1], [33])
    index.insert(torch.zeros(16, dtype=torch.int32, device="cuda"), 1)
    index.insert(ints([1]).cuda(), 1, start=6)
    index.insert(ints([3, -1]).cuda())
    assert index._index.digest() == digest and index.statistics.refused == 7
    extend([[5, -1], [5, 6], [-1, 6]], [1, 2, 1])
    twins.cpu.insert(ints([5]), 0)
    twins.cpu.insert(ints([5, 6]), 1)
    assert index._index.digest() == twins.cpu._index.digest() and index.statistics.refused == 8


def test_ngram_index_copies_between_devices() -> None:
    index = sd.NgramIndex(1000, 2, 100)
    index.insert(ints(list(range(40))), 1)
    there = index.to("cuda")
    assert there._index.digest() == index._index.digest() == there.to("cpu")._index.digest()
    there.insert(ints([1, 2]).cuda(), 1)
    assert there.length(1) == 42 and index.length(1) == 40 and there.to("cuda:0").length(1) == 42


def cuda_index() -> sd.NgramIndex:
    return sd.NgramIndex(100, 2, 10, device="cuda")


REFUSED: list[tuple[Callable[[sd.NgramIndex], object], str]] = [
    (lambda i: i.insert(ints([1])), "ngram_insert: tokens is on cpu, expected cuda:0 like the index"),
    (lambda i: i.draft(None, ints([1]), 4), "ngram_draft: seq_lens is on cpu, expected cuda:0 like the index"),
    (lambda i: i.extend(ints([[1]]), ints([1]), None), "ngram_extend: tokens is on cpu, expected cuda:0 like the index"),
    (lambda i: i.begin(2), "ngram_begin: slot is 2, expected 0 to 1"),
    (lambda i: i.release(-1), "ngram_release: slot is -1, expected 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_ngram_cuda_error_messages(call: Callable[[sd.NgramIndex], object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call(cuda_index())
    assert str(error.value) == message
