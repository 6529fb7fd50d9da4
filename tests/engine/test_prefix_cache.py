"""The prefix cache: its radix tree against a naive model, and engines that say with it what they say without.

What the scheduler does with it, page by page, is in test_scheduler.py: there half of the random mixes have a cache.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from torch import Tensor

from specdec_kernels import _C, FinishReason
from specdec_kernels.engine import (
    Draft,
    Eagle3,
    Engine,
    Ngram,
    RequestOutput,
    SamplingParams,
    Standalone,
    Union,
)
from specdec_kernels.engine.drafts import DraftRequest
from specdec_kernels.engine.drafts.composition import pools_of
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive, thinned
from support.leaks import cached_pages, expect_nothing_left, expect_nothing_lost
from support.observed_rounds import prefills_of, wrap_method
from support.sampled_texts import differing
from support.tiny_checkpoint import held_out

# --- the tree

Page = tuple[int, ...]  # all tokens of a prefix, and the next `lookahead` ones


class PrefixCaches(RuleBasedStateMachine):
    """The tree, and a dict of all its pages by the texts they end."""

    nodes = Bundle("nodes")

    @initialize(places=st.integers(0, 12), page_size=st.integers(1, 3), lookahead=st.integers(1, 4))
    def start(self, places: int, page_size: int, lookahead: int) -> None:
        self.cache = _C.PrefixCache(places, page_size, lookahead=lookahead)
        self.num_places, self.page_size, self.lookahead = places, page_size, lookahead
        self.places: dict[Page, int] = {}
        self.used: dict[Page, int] = {}
        self.locks: Counter[Page] = Counter()
        self.clock = 0
        self.era = 0  # locks of earlier ones are void

    def pages(self, text: list[int], most: int) -> list[Page]:
        size = self.page_size
        ends = range(size, len(text) - self.lookahead + 1, size)
        return [tuple(text[: end + self.lookahead]) for end in ends][:most]

    def is_leaf(self, page: Page) -> bool:
        return not any(len(other) > len(page) and other[: len(page)] == page for other in self.places)

    def use(self, pages: list[Page]) -> tuple[int, list[Page]]:
        self.clock += 1
        for page in pages:
            self.used[page] = self.clock
            self.locks[page] += 1
        return self.era, pages

    texts = st.lists(st.integers(0, 1), max_size=14)

    @rule(target=nodes, text=texts, most=st.integers(0, 6))
    def find(self, text: list[int], most: int) -> Any:
        node, places = self.cache.find(text, most)
        pages = self.pages(text, most)
        known = next((i for i, page in enumerate(pages) if page not in self.places), len(pages))
        assert places == [self.places[page] for page in pages[:known]]
        return node, *self.use(pages[:known])

    @rule(target=nodes, text=texts, count=st.integers(0, 6))
    def insert(self, text: list[int], count: int) -> Any:
        node, places = self.cache.insert(text, count)
        pages = self.pages(text, count)
        known = sum(page in self.places for page in pages)
        assert len(places) == min(len(pages), known + self.num_places - len(self.places))
        assert places[:known] == [self.places[page] for page in pages[:known]]
        new = places[known:]
        assert len({*new}) == len(new) and not {*new} & {*self.places.values()}
        assert all(0 <= place < self.num_places for place in new)
        self.places.update(zip(pages, places, strict=False))
        return node, *self.use(pages[: len(places)])

    @rule(held=consumes(nodes))
    def unlock(self, held: Any) -> None:
        node, era, pages = held
        if era == self.era:
            self.cache.unlock(node)
            self.locks.subtract(pages)

    @precondition(lambda self: self.places)
    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        want = []
        while len(want) < count:
            free = [page for page in self.places if self.is_leaf(page) and not self.locks[page]]
            if not free:
                break
            want.append(self.places.pop(min(free, key=self.used.__getitem__)))
        assert self.cache.evict(count) == want

    @rule()
    def clear(self) -> None:
        assert sorted(self.cache.clear()) == sorted(self.places.values())
        self.places.clear()
        self.locks.clear()
        self.era += 1

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.size == len(self.places)
            assert self.cache.num_locked == sum(self.locks[page] > 0 for page in self.places)


TestPrefixCaches = PrefixCaches.TestCase
TestPrefixCaches.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_long_text_in_many_nodes_is_cleared() -> None:
    """No destructor calls the next one: a text of a million pages would leave no stack."""
    cache, text = _C.PrefixCache(200_000, 1), [0] * 200_001
    for pages in range(1, 200_001, 997):
        cache.insert(text[: pages + 1], pages)
    assert cache.size == len(cache.clear()) == 199_401 and cache.size == 0


def test_find_snapshot_returns_the_longest_prefix_that_has_one() -> None:
    cache, text = _C.PrefixCache(8, 2, 3), [*range(12)]
    node, _ = cache.insert(text, 5)
    cache.unlock(node)
    assert cache.find_snapshot(text, 5) == (0, -1)
    kept = {pages: cache.take_snapshot() for pages in (2, 4)}
    for pages, snapshot in kept.items():
        cache.keep_snapshot(text, pages, snapshot)
    assert cache.find_snapshot(text, 5) == (4, kept[4]) and cache.find_snapshot(text, 3) == (2, kept[2])
    assert cache.find_snapshot([*text[:6], 9, 9, 9], 4) == (2, kept[2]), "it diverges after three pages"
    # One that cannot be kept is given back: of a prefix that has one, or is not cached.
    for other, pages in ((text, 2), ([7, 7, 7, 7], 1)):
        cache.keep_snapshot(other, pages, cache.take_snapshot())
        assert cache.num_snapshots == 2
    cache.find_snapshot(text, 5)
    assert cache.take_snapshot() not in kept.values() and cache.take_snapshot() == kept[2], "least recently used"
    assert cache.find_snapshot(text, 3) == (0, -1) and cache.take_snapshot() == kept[4]
    assert cache.take_snapshot() == -1 and cache.num_evicted_snapshots == 2


def test_evicted_page_loses_its_snapshot_and_those_after_it() -> None:
    cache, text = _C.PrefixCache(8, 2, 2), [*range(12)]
    node, places = cache.insert(text, 5)
    cache.unlock(node)
    for pages in (2, 4):
        cache.keep_snapshot(text, pages, cache.take_snapshot())
    assert cache.evict(1) == [places[4]] and cache.find_snapshot(text, 5)[0] == 4
    assert cache.evict(1) == [places[3]] and cache.find_snapshot(text, 5)[0] == 2
    assert (cache.num_snapshots, cache.num_evicted_snapshots) == (1, 1)
    cache.clear()
    assert cache.num_snapshots == 0 and cache.find_snapshot(text, 5) == (0, -1)


# --- engines

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "eagle3-tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "ngram": lambda: Ngram(num_nodes=8),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=3, topk=2, num_nodes=8),
    "union": lambda: Union(
        Eagle3(tiny_model("eagle3"), num_steps=3, topk=2, num_nodes=8), Ngram(num_nodes=8), num_nodes=12
    ),
}
MAX_LEN = 128


def make_engine(draft: Draft | None, device: torch.device | str = "cpu", **options: Any) -> Engine:
    given = {
        "max_len": MAX_LEN,
        "adaptive": False,
        "num_slots": 5,
        "page_size": 4,
        "prefill_chunk": 48,
        "prefix_cache": True,
    } | options
    return Engine(tiny_model("target"), draft=draft, dtype=torch.float32, device=device, **given)


def test_a_leak_is_not_what_the_cache_keeps() -> None:
    """The check that all tests end with finds a page that nobody holds, and one that the cache has and somebody else."""
    engine = make_engine(None)
    engine.generate([held_out("code")[0][:40]], SamplingParams(3))
    expect_nothing_left(engine)
    pool = engine.state.all_pages
    for change in (pool.num_free, pool.page_refs[cached_pages(engine)[0]]):
        change -= 1
        with pytest.raises(AssertionError):
            expect_nothing_left(engine)
        change += 1


def shared_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Tails of several lengths after two prefixes that end within a page, some twice."""
    first, second, *others = held_out("code")[:20]
    starts = first[:37], second[:22]
    prompts = [[*rng.choice(starts), *rng.choice(others)[: rng.choice([1, 2, 5, 11])]] for _ in range(count - 3)]
    return [*prompts, prompts[0], first[:1], first[:2]]


def any_params(count: int, rng: random.Random) -> list[SamplingParams]:
    kinds = [{}, {}, {"temperature": 0.8, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9}]
    return [SamplingParams(rng.choice([1, 7, 18, 30]), seed=i, **rng.choice(kinds)) for i in range(count)]


Said = list[tuple[RequestOutput, SamplingParams]]


def say(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], said: Said, **options: Any) -> Said:
    fresh = list(zip(engine.generate(prompts, params, **options), params, strict=True))
    said += fresh
    return fresh


def converse(engine: Engine, rng: random.Random) -> Said:
    """Prompts that begin alike, the same again, what goes on from all answers, samples of one prompt, cancels."""
    said: Said = []
    prompts, params = shared_prompts(9, rng), any_params(9, rng)
    say(engine, prompts, params, said)
    for output, sampling in say(engine, prompts[::-1], params[::-1], said):
        assert output.cached_tokens >= (len(output.prompt_tokens) - 2) // 4 * 4 * (engine.config.num_pages > 300)
        assert output.cached_tokens % 4 == 0 and sampling.seed is not None
    # Stop tokens end an answer amid a page; what follows begins with its last tokens, whose rows nobody has written.
    stops = [SamplingParams(30, stop_token_ids=[output.tokens[len(output.tokens) // 2]]) for output, _ in said[:9]]
    answers = [output for output, _ in say(engine, prompts, stops, said)]
    turns = [[*o.prompt_tokens, *o.tokens, *prompts[3][:3]] for o in answers]
    say(engine, turns, any_params(9, rng), said)
    say(engine, [turns[0]] * 6, [SamplingParams(12, temperature=1.0, seed=i) for i in range(6)], said)
    long = [SamplingParams(1000, ignore_eos=True)] * 4
    cancelled = say(engine, prompts[:4], long, [], on_tokens=lambda new: rng.random() < 0.3)
    said += [(output, sampling) for output, sampling in cancelled if output.finish_reason == FinishReason.CONTEXT]
    turns = [[*o.prompt_tokens, *o.tokens][: MAX_LEN - 8] for o, _ in cancelled]
    say(engine, turns, any_params(4, rng), said)
    return said


@pytest.mark.parametrize(
    ("name", "pressure"),
    thinned(
        itertools.product(DRAFTS, [False, True]),
        {("standalone", True), ("union", False)}.__contains__,
    ),
)
def test_prefix_cache_keeps_texts(name: str, pressure: bool, device: torch.device) -> None:
    """And those without speculation. In a small pool pages are evicted and requests retracted all the time."""
    options: dict[str, Any] = {"num_pages": 40, "rounds_in_flight": 2} if pressure else {"num_pages": 600}
    engine = make_engine(DRAFTS[name](), device, **options)
    said = converse(engine, random.Random(3))
    stats = engine.stats()
    assert stats.prefix_hits > 20 and stats.cached_tokens > 400
    assert (stats.retractions > 0) == pressure
    expect_nothing_lost(engine)

    prompts, params = [output.prompt_tokens for output, _ in said], [sampling for _, sampling in said]
    want = make_engine(None, device, prefix_cache=False, num_slots=8, rounds_in_flight=1).generate(prompts, params)
    ours = [output for output, _ in said]
    assert differing(ours, want, params) <= 2
    assert sum(a.finish_reason == b.finish_reason for a, b in zip(ours, want, strict=True)) >= len(ours) - 2


@contextmanager
def cached_pages_watched(engine: Engine) -> Iterator[list[int]]:
    """Nothing that runs writes a page of the cache; yields how many were there at each call."""
    counts: list[int] = []
    pools = [group for pools in (engine.target.pools, *pools_of(engine.draft)) for group in pools.groups]

    def contents() -> list[Tensor]:
        pages = cached_pages(engine)
        counts.append(len(pages))
        return [kv[:, pages].clone() for group in pools for kv in group.pools]

    def watch(call: Callable[..., None], *arguments: Any) -> None:
        before = contents()
        call(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(before, contents(), strict=True)), "a cached page is written"

    for name in ("prefill", "activate", "launch"):
        wrap_method(engine.core.executor, name, watch)
    yield counts


@pytest.mark.parametrize("name", [*exhaustive("eagle3-tree"), "standalone"])
def test_cached_pages_are_never_written(name: str) -> None:
    engine = make_engine(DRAFTS[name](), num_pages=70)
    with cached_pages_watched(engine) as counts:
        converse(engine, random.Random(5))
    assert max(counts) > 20 and engine.stats().prefix_hits > 20
    expect_nothing_lost(engine)


@pytest.mark.parametrize("name", ["eagle3-tree", *exhaustive("standalone")])
def test_cached_rows_stay_as_they_are(name: str, device: torch.device) -> None:
    """Also where rounds are graphs: what a first wave leaves is there, to the bit, after others that begin with it."""
    engine = make_engine(DRAFTS[name](), device, num_pages=800, num_slots=4)
    rng = random.Random(7)
    prompts = shared_prompts(8, rng)
    engine.generate(prompts, SamplingParams(20))
    engine.core.scheduler.settle()
    pools = [group for pools in (engine.target.pools, *pools_of(engine.draft)) for group in pools.groups]
    pages = cached_pages(engine)
    before = [kv[:, pages].clone() for group in pools for kv in group.pools]
    for _ in range(2):
        outputs = engine.generate(prompts, SamplingParams(30, temperature=1.0, seed=rng.randrange(99)))
        engine.generate([[*o.prompt_tokens, *o.tokens] for o in outputs], SamplingParams(9))
    assert {*pages} <= {*cached_pages(engine)} and engine.stats().prefix_hits >= 24
    after = [kv[:, pages] for group in pools for kv in group.pools]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    expect_nothing_lost(engine)


@pytest.mark.parametrize("name", ["none", "eagle3-tree", "standalone"])
def test_samples_that_come_together_prefill_their_prompt_once(name: str) -> None:
    engine = make_engine(DRAFTS[name](), num_slots=6, num_pages=600)
    passes = prefills_of(engine)
    prompt = held_out("code")[0][:80]
    outputs = engine.generate([prompt], SamplingParams(10, temperature=1.0, seed=0, n=6))
    chunks = [(chunk.start, len(chunk.tokens) - 1) for chunks in passes for chunk in chunks]
    assert chunks == [(0, 48), (48, 32)] + [(76, 4)] * 5
    assert [output.cached_tokens for output in outputs] == [0] + [76] * 5
    stats = engine.stats()
    assert (stats.prefix_hits, stats.cached_tokens) == (5, 5 * 76) and stats - stats == stats - stats


def test_prefix_cache_short_match_delays_nobody() -> None:
    """Who shares less than half of its prompt with one that is being prefilled does not wait for it."""
    engine = make_engine(None, num_slots=4, num_pages=600, prefill_chunk=2048)
    passes = prefills_of(engine)
    first, second, *_ = held_out("code")
    engine.generate([first[:40], first[:12] + second[:28], second[:30]], SamplingParams(4))
    assert [len(chunks) for chunks in passes] == [3]


def test_prefix_cache_multi_turn_prompt_prefills_last_turn(device: torch.device) -> None:
    """All rows but those of the last round, whose tokens have no rows of the draft, in whole pages."""
    engine = make_engine(DRAFTS["eagle3-tree"](), device, num_pages=600)
    prompt = held_out("code")[0][:50]
    (answer,) = engine.generate([prompt], SamplingParams(30, ignore_eos=True))
    turn = [*prompt, *answer.tokens, 5, 6, 7]
    (output,) = engine.generate([turn], SamplingParams(3))
    assert len(turn) - 3 - 4 - 5 - 1 <= output.cached_tokens <= len(turn) - 5
    expect_nothing_lost(engine)


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_that_a_resting_draft_has_not_written_are_not_shared(adaptive: bool) -> None:
    """Of a request without drafts its prompt alone; of others what the draft has caught up with."""
    engine = make_engine(DRAFTS["eagle3-tree"](), adaptive=adaptive, num_pages=600)
    prompt = held_out("code")[0][:50]
    (answer,) = engine.generate([prompt], SamplingParams(30, ignore_eos=True, speculation="off"))
    turn = [*prompt, *answer.tokens, 5, 6, 7]
    with cached_pages_watched(engine):
        (output,) = engine.generate([turn], SamplingParams(30, ignore_eos=True))
        assert output.cached_tokens == 48
        (again,) = engine.generate([[*turn, *output.tokens, 5, 6]], SamplingParams(3))
    assert again.cached_tokens >= len(turn) // 4 * 4 + (0 if adaptive else 8)
    want = make_engine(None, prefix_cache=False).generate([turn], SamplingParams(30, ignore_eos=True))
    assert output.tokens == want[0].tokens
    expect_nothing_lost(engine)


def test_penalties_count_what_was_not_prefilled() -> None:
    asked = SamplingParams(24, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2)
    prompt = held_out("code")[0][:60]
    (want,) = make_engine(None, prefix_cache=False).generate([prompt], asked)
    (free,) = make_engine(None, prefix_cache=False).generate([prompt], SamplingParams(24))
    engine = make_engine(DRAFTS["eagle3-tree"]())
    for _ in range(2):
        (output,) = engine.generate([prompt], asked)
        assert output.tokens == want.tokens != free.tokens
    assert output.cached_tokens == 56


def test_prefix_cache_evicts_oldest_pages() -> None:
    """Room for one longest request, and some pages more: the prompt that was not used for the longest time goes."""
    engine = make_engine(None, num_slots=1, num_pages=45)
    first, second, third = (prompt[:66] for prompt in held_out("code")[:3])

    def cached(prompt: list[int]) -> int:
        return engine.generate([prompt], SamplingParams(1))[0].cached_tokens

    assert [cached(first), cached(second), cached(first)] == [0, 0, 64]
    assert cached(third) == 0 and cached(first) == 64, "the second one's pages went"
    assert cached(second) < 64
    expect_nothing_lost(engine)


def test_prefix_cache_clear_while_requests_run(device: torch.device) -> None:
    engine = make_engine(DRAFTS["eagle3-tree"](), device, num_pages=600)
    prompt = held_out("code")[0][:40]
    engine.clear_cache()
    (want,) = engine.generate([prompt], SamplingParams(60, ignore_eos=True))
    running = engine.submit_many([prompt] * 3, SamplingParams(60, ignore_eos=True))
    for request in running:
        next(iter(request))
    engine.clear_cache()
    assert [request.result().tokens for request in running] == [want.tokens] * 3
    assert [request.result().cached_tokens for request in running] == [36] * 3
    expect_nothing_lost(engine)
    engine.close()
    with pytest.raises(RuntimeError, match="Engine is closed, expected an open one"):
        engine.clear_cache()


def test_engine_without_prefix_cache_keeps_no_pages() -> None:
    engine = make_engine(None, prefix_cache=False)
    for _ in range(2):
        (output,) = engine.generate([held_out("code")[0][:40]], SamplingParams(3))
        assert output.cached_tokens == 0
    engine.clear_cache()
    assert engine.state.pool.page_table.shape == engine.state.all_pages.page_table.shape
    assert int(engine.state.pool.num_free) == engine.config.num_pages and engine.stats().prefix_hits == 0


def test_prefix_cache_default() -> None:
    for draft, options, kept in (
        (None, {}, True),
        (Reader(), {}, False),
        (None, {"batch_invariant": True}, False),
    ):
        with make_engine(draft, prefix_cache=None, **options) as engine:
            assert engine.config.prefix_cache == kept


class Reader(Draft):
    """A draft that keeps something of prompts outside of pools."""

    cacheable = False


class Listener(Draft):
    """A draft of one's own, which learns where its prefill begins."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def begin(self, slot: int, request: DraftRequest) -> None:
        self.heard.append(request.cached)


def test_prefix_cache_notifies_draft() -> None:
    draft = Listener()
    engine = make_engine(draft)
    for _ in range(2):
        engine.generate([held_out("code")[0][:40]], SamplingParams(3))
    assert draft.heard == [0, 36]


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (
            None,
            {"batch_invariant": True},
            "Engine: prefix_cache is set, expected not with batch_invariant "
            "(rows that another request has written are equal up to rounding)",
        ),
        (
            Reader(),
            {},
            "Engine: prefix_cache is set, expected not with Reader, "
            "which keeps more of a prompt than the rows of its pools",
        ),
        (
            Union(Ngram(), Reader()),
            {},
            "Engine: prefix_cache is set, expected not with Union, "
            "which keeps more of a prompt than the rows of its pools",
        ),
    ],
    ids=["batch_invariant", "reader", "union"],
)
def test_prefix_cache_error_messages(draft: Draft | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_engine(draft, **options)
    assert str(error.value) == message
