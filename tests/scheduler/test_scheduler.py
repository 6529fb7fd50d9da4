"""The scheduler against a model of the device that knows every page, slot and token."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_kernels import _C

STOP, LENGTH, CONTEXT, CANCELLED, ERROR, TIMEOUT = 1, 2, 3, 4, 5, 6
STALLED, BAD_TREE, BAD_LENGTH = 1, 2, 8
CATCH_UP, FIRST_ROUND = _C.CATCH_UP, _C.FIRST_ROUND


@dataclass(frozen=True)
class Sizes:
    num_slots: int = 3
    num_pages: int = 64
    page_size: int = 4
    max_len: int = 24
    reserve: int = 6
    accept_width: int = 4
    prefill_chunk: int = 5
    prefill_requests: int = 3
    max_stops: int = 2
    max_logprobs: int = 2
    rounds_in_flight: int = 1
    draft_can_idle: bool = False
    prefix_cache: bool = False
    batch_sizes: tuple[int, ...] = (1, 2, 3)
    window: int = 0
    rows: tuple[tuple[int, ...], ...] = ()  # of each batch size; none: 4 for each request
    plain_rounds: bool = False
    max_idle_rounds: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            object.__setattr__(self, "rows", tuple((4 * batch,) for batch in self.batch_sizes))

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    def pages(self, rows: int, started: bool = False) -> int:
        whole = -(-(min(rows, self.max_len) + self.reserve) // self.page_size)
        ahead = self.reserve if started else max(self.reserve, self.prefill_chunk)
        return min(whole, -(-(self.window + ahead) // self.page_size) + 1) if self.window else whole

    @property
    def max_pages(self) -> int:
        return -(-(self.max_len + self.reserve) // self.page_size)

    @property
    def num_levels(self) -> int:
        most = max(map(len, self.rows))
        return most if most > 1 else 0

    @property
    def row_words(self) -> int:
        return 4 + self.accept_width

    @property
    def score_words(self) -> int:
        return self.accept_width * (1 + 2 * self.max_logprobs) if self.max_logprobs >= 0 else 0

    @staticmethod
    def random(rng: random.Random, rounds_in_flight: int = 1) -> Sizes:
        num_slots, accept_width, max_len = rng.randint(1, 6), rng.randint(1, 6), rng.randint(2, 40)
        window = rng.choice([0, 0, rng.randint(1, 16)])
        smaller = rng.sample(range(1, num_slots + 1), rng.randint(0, num_slots))
        batch_sizes = tuple(sorted({*smaller, num_slots if rng.random() < 0.7 else rng.randint(1, num_slots)}))
        rests = rng.random() < 0.5  # in rounds of the lowest levels, which have a row for each request
        kinds = [sorted(rng.sample(range(b + rests, 9 * b), rng.randint(1, 3))) for b in batch_sizes]
        sizes = Sizes(
            num_slots=num_slots,
            page_size=rng.choice([1, 2, 3, 4, 16]),
            max_len=max_len,
            reserve=accept_width + rng.randint(1, 6),
            accept_width=accept_width,
            prefill_chunk=rng.randint(1, 12),
            prefill_requests=rng.choice([1, 2, 9]),
            rounds_in_flight=rounds_in_flight,
            max_logprobs=rng.choice([0, 1, 3]),
            batch_sizes=batch_sizes,
            rows=tuple((b, *each) if rests else tuple(each) for b, each in zip(batch_sizes, kinds, strict=True)),
            plain_rounds=rng.random() < 0.5,
            max_idle_rounds=rng.randint(1, 4) if rests else 0,
            window=window,
            draft_can_idle=rests or rng.random() < 0.3,
            prefix_cache=not window and rng.random() < 0.6,
        )
        smallest = sizes.pages(max_len)
        return Sizes(**{**vars(sizes), "num_pages": rng.choice([smallest, smallest + 1, 2 * smallest, 9 * smallest])})


def token(request_id: int, position: int) -> int:
    """The token of a request at a position, whatever happens to it: a lost or repeated one is seen."""
    return (request_id * 7919 + position * 104729) % 997


def scores_of(tokens: list[int], num_logprobs: int) -> tuple[list[float], list[int], list[float]]:
    """Those of tokens, by their values: own log-probability, best entries and theirs."""
    tops = [token + i for token in tokens for i in range(num_logprobs)]
    return [token / -4 for token in tokens], tops, [token / -8 for token in tops]


class Pages:
    """The device's pages: who owns them, and what stands in each row of each.

    A row is known by the tokens up to it, as the last layer of a target would know it, and by the one behind them, too,
    where a draft head has written its own. 0 is what nobody may read.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.entries: dict[int, int] = {}  # of the page table: slots' rows first, then the cache's places
        self.owners = [0] * sizes.num_pages
        self.rows = [[0] * sizes.page_size for _ in self.owners]
        self.first_place = sizes.num_slots * sizes.max_pages

    def of(self, slot: int) -> dict[int, int]:
        """The pages of a slot, by their places in its table."""
        first, entries = slot * self.sizes.max_pages, self.entries
        return {i: entries[first + i] for i in range(self.sizes.max_pages) if first + i in entries}

    def cached(self) -> set[int]:
        return {page for entry, page in self.entries.items() if entry >= self.first_place}

    def take(self, slot: int, behind: int, begin: int, end: int) -> None:
        """Gives back a slot's pages in front of `behind`, and gives it those from `begin` on."""
        first = slot * self.sizes.max_pages
        self.assign([-1] * behind, [*range(first, first + behind)])
        free = [page for page, owners in enumerate(self.owners) if not owners]
        for index in range(max(begin, behind), end):
            assert free, "the pool overflows"
            self.entries[first + index] = page = free.pop()
            self.owners[page] = 1

    def assign(self, sources: list[int], destinations: list[int]) -> None:
        assert len(set(destinations)) == len(sources) == len(destinations) and not {*sources} & {*destinations}
        assert all(0 <= entry < self.first_place + self.sizes.num_pages for entry in destinations)
        for source in sources:
            if source >= 0:
                self.owners[self.entries[source]] += 1
        for source, destination in zip(sources, destinations, strict=True):
            if (page := self.entries.pop(destination, None)) is not None:
                self.owners[page] -= 1
            if source >= 0:
                self.entries[destination] = self.entries[source]

    def free(self, slot: int) -> None:
        first = slot * self.sizes.max_pages
        self.assign([-1] * self.sizes.max_pages, [*range(first, first + self.sizes.max_pages)])

    def write(self, slot: int, row: int, value: int) -> None:
        pages, size = self.of(slot), self.sizes.page_size
        if self.sizes.window and row // size < min(pages):
            return  # it has been given back
        page = pages[row // size]
        assert self.owners[page] == 1, "a shared page is written"
        self.rows[page][row % size] = value

    def write_text(self, slot: int, text: list[int], begin: int, end: int, drafted: bool = True) -> None:
        for row in range(begin, end):
            self.write(slot, row, hash((drafted, *text[: row + 1 + drafted])))

    def expect_text(self, slot: int, text: list[int], end: int, drafted: bool = True) -> None:
        pages, size = self.of(slot), self.sizes.page_size
        first = min(pages, default=0) * size if self.sizes.window else 0
        for row in range(first, end):
            values = {hash((has, *text[: row + 1 + has])) for has in {True, drafted}}
            assert self.rows[pages[row // size]][row % size] in values, "a row of another text"


@dataclass
class Slot:
    number: int
    request_id: int
    text: list[int]
    rows: int = 0  # committed
    end_page: int = 0  # of those it has had
    rounds: int = 0
    active: bool = False  # a command said so
    started: bool = False  # and the call that follows
    begun: bool = False  # its first round has been launched
    finished: bool = False
    left: bool = False  # the scheduler has said so; the slot is held until a record gives it back
    chunks_waited: int = 0
    behind: int = 0  # rounds at rest that its draft has yet to catch up with
    told: int = 0  # tokens of the text that the executor was told of, where it rules on them
    drafted: int = 0  # rows that the draft has written, too

    @property
    def takes_part(self) -> bool:
        return self.begun and not self.finished and not self.left


@dataclass
class Sent:
    """What the test knows of a request."""

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: list[int]
    produced: list[int] = field(default_factory=list)  # on the device
    emitted: list[int] = field(default_factory=list)
    reason: int = 0
    status: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    min_new_tokens: int = 0
    num_logprobs: int = -1
    max_nodes: int = 0
    extra: Any = None
    constrained: bool = False
    priority: int = 0
    timeout_ns: int = 0
    rounds: int = 0  # but for first ones
    drafted: int = 0
    accepted: int = 0
    cancelled: bool = False
    failed: bool = False
    ended: bool = False  # its slot has been left for good
    error: BaseException | None = None


class Fault(Exception):
    pass


DEPTH = 5


def rings(sizes: Sizes, depth: int = DEPTH) -> dict[str, Any]:
    commands = _C.command_words(sizes.max_batch, sizes.num_slots, sizes.max_stops)
    results = _C.result_words(sizes.max_batch, sizes.accept_width, sizes.num_levels, sizes.max_logprobs)
    return {"commands": np.full((depth, commands), -1, np.int32), "results": np.zeros((depth, results), np.int32)}


DEFAULTS = {
    **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0},
    **{"min_new_tokens": 0, "num_logprobs": -1, "ngram_group": 0, "max_nodes": 0, "streams": True, "extra": None},
    **{"constrained": False, "migrated": False, "priority": 0, "timeout_ns": 0},
}


def submission(prompt: Any, max_new_tokens: Any, stop_tokens: Any = (), **options: Any) -> Any:
    """What `submit_many` takes for each request."""
    return (prompt, max_new_tokens, stop_tokens, *(DEFAULTS | options).values())


class Device:
    """A fake executor. It models the device exactly, and asserts what the scheduler owes it at every call."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.rng = sizes, random.Random(seed)
        made = rings(sizes)
        self.commands, self.results = made["commands"], made["results"]
        self.num_applied = self.num_published = 0
        self.scheduler = _C.Scheduler(self, **vars(sizes), **made)
        self.num_catch_ups = 0
        if sizes.max_idle_rounds:  # rounds take any time, and so any level may be the best one
            costs = [[float(n) for n in each] for each in sizes.rows], [self.rng.uniform(0.1, 50) for _ in sizes.rows]
            self.scheduler.set_costs(_C.RoundCosts(sizes.batch_sizes, sizes.rows, *costs))
        self.pages = Pages(sizes)
        self.slots: dict[int, Slot] = {}  # in the order of `begin`
        self.rests = False  # the draft, in the round that is running
        self.late: tuple[Any, ...] | None = None  # what may fail once a launch has done its work
        self.needed_apart = 0  # pages, before slots came to share some
        self.ended_first = False  # somebody, with a first round of this turn
        self.drafted: list[int] = []  # slots of a round that has come as far as the target's logits
        self.sent: dict[int, Sent] = {}
        self.visible: set[int] = set()  # submitted before this turn (stays empty where others drive the loop)
        self.to_cancel: set[int] = set()  # cancelled before this turn
        self.first_starts: list[int] = []
        self.retracted: list[int] = []
        self.events: list[str] = []
        self.faults: dict[str, float] = {}  # method -> probability of raising
        self.stall = 0.0
        self.streams = True
        self.priorities = [0]  # of requests, in turn
        self.timeouts = [0]
        self.on_call: Any = lambda: None  # from inside an executor call
        self.driven = False  # by a thread of its own, so that the device may be ahead of what is emitted
        self.spoil: Any = lambda row, sent: None  # damages a row of the results

    # --- driving

    @staticmethod
    def sampling(request_id: int) -> dict[str, Any]:
        return {
            "temperature": request_id / 8,
            "top_k": request_id,
            "top_p": 0.5,
            "min_p": 0.25,
            "seed": (-1) ** request_id * (request_id + 2**40),
        }

    def submit(self, prompt: list[int], max_new_tokens: int, stop_tokens: list[int] = []) -> int:  # noqa: B006
        number = len(self.sent)
        if number % 2:
            (request_id,) = self.submit_many([(prompt, max_new_tokens, stop_tokens)])
            return request_id
        wants = self.wants(number, max_new_tokens)
        request_id = self.scheduler.submit(
            prompt,
            max_new_tokens,
            stop_tokens,
            **self.sampling(number),
            streams=self.streams,
            ngram_group=number % 5,
            **wants,
        )
        self.sent[request_id] = Sent(prompt, max_new_tokens, stop_tokens, **wants)
        return request_id

    def wants(self, number: int, max_new_tokens: int) -> dict[str, Any]:
        return {
            "min_new_tokens": min(number % 3, max_new_tokens),
            "num_logprobs": number % (self.sizes.max_logprobs + 2) - 1,
            "max_nodes": number % 3,
            "extra": [number] if number % 3 else None,
            "constrained": number % 4 == 3,
            "priority": self.priorities[number % len(self.priorities)],
            "timeout_ns": self.timeouts[number % len(self.timeouts)],
        }

    def submit_many(self, requests: list[tuple[list[int], int, list[int]]]) -> list[int]:
        first = len(self.sent)
        wants = [self.wants(number, budget) for number, (_, budget, _) in enumerate(requests, first)]
        every = [
            submission(*request, **self.sampling(number), **wanted, ngram_group=number % 5, streams=self.streams)
            for number, (request, wanted) in enumerate(zip(requests, wants, strict=True), first)
        ]
        ids = self.scheduler.submit_many(every)
        for request_id, request, wanted in zip(ids, requests, wants, strict=True):
            self.sent[request_id] = Sent(*request, **wanted)
        return ids

    def submit_any(self) -> int:
        rng, next_id = self.rng, len(self.sent)
        prompt = [rng.randrange(997) for _ in range(rng.choice([1, 2, rng.randint(1, self.sizes.max_len)]))]
        if self.sent and rng.random() < 0.6:  # it goes on from somebody's text, or begins as it does
            other = self.sent[rng.randrange(len(self.sent))]
            text = other.prompt + other.emitted
            prompt = text[: rng.choice([len(text), rng.randint(1, len(text))])] + prompt[: rng.randrange(4)]
        prompt = prompt[: self.sizes.max_len - 1]
        stops = [token(next_id, len(prompt) + rng.randrange(30))] if rng.random() < 0.3 else []
        assert self.submit(prompt, rng.choice([1, 3, 10, 1000]), stops) == next_id
        return next_id

    def cancel(self, request_id: int) -> None:
        sent = self.sent[request_id]
        was_alive = self.scheduler.cancel(request_id)
        sent.cancelled |= was_alive
        if sent.reason:
            assert not was_alive

    def step(self) -> bool:
        self.visible, self.ended_first = set(self.sent), False
        self.to_cancel = {i for i, s in self.sent.items() if s.cancelled or s.timeout_ns == 1}
        again = self.step_alone()
        held = [slot for slot in self.slots.values() if not slot.left]
        assert self.scheduler.num_running == len(held)
        assert self.scheduler.num_waiting == sum(not s.reason for s in self.sent.values()) - len(held)
        if self.sizes.rounds_in_flight == 1:
            free = self.sizes.num_pages - self.needed(0, cached=True)
            assert self.scheduler.num_free_pages_estimate == free or self.faults.get("assign_pages")
            left = any(not s.reason for s in self.sent.values()) or any(s.left for s in self.slots.values())
            assert again == left or self.faults.get("assign_pages")
        else:
            assert again or all(s.reason for s in self.sent.values())
        return again

    def step_alone(self) -> bool:
        """A turn after which the device need not be as the scheduler thinks."""
        try:
            return self.scheduler.step()
        finally:
            self.emit(self.scheduler.take(wait=False) or [])

    def run(self) -> None:
        turns = 0
        while self.step():
            turns += 1
            assert turns < 20_000, "the loop does not come to an end"
        assert self.scheduler.num_retractions == len(self.retracted)
        self.check_all_done()
        self.on_call = lambda: None
        self.scheduler.clear_cache()
        self.step()
        assert not any(self.pages.owners) and self.scheduler.num_cached_pages == 0

    def check_all_done(self) -> None:
        assert not self.slots and self.scheduler.num_waiting == self.scheduler.num_running == 0
        cached = self.pages.cached()
        assert [owners > 0 for owners in self.pages.owners] == [page in cached for page in range(self.sizes.num_pages)]
        assert self.scheduler.num_cached_pages == len(cached)
        assert self.scheduler.num_free_pages_estimate == self.pages.owners.count(0)
        for request_id, sent in self.sent.items():
            want, reason = self.expected(request_id)
            assert sent.emitted == want[: len(sent.emitted)]
            if sent.reason == CANCELLED:
                assert sent.cancelled
            elif sent.reason == ERROR:
                assert sent.failed or sent.status
            elif sent.reason == TIMEOUT:
                assert sent.timeout_ns and (sent.timeout_ns > 1 or request_id not in self.first_starts)
            else:
                assert sent.timeout_ns != 1
                assert (sent.emitted, sent.reason) == (want, reason)

    def expected(self, request_id: int) -> tuple[list[int], int]:
        sent, tokens = self.sent[request_id], []
        while True:
            position = len(sent.prompt) + len(tokens)
            tokens.append(token(request_id, position))
            if tokens[-1] in sent.stop_tokens:
                return tokens, STOP
            if len(tokens) == sent.max_new_tokens:
                return tokens, LENGTH
            if position + 1 == self.sizes.max_len:
                return tokens, CONTEXT

    # --- what is true of the pool

    def needed(self, rounds: int, cached: bool = False) -> int:
        """Pages of those who hold slots, shared ones once, and what these lack; with the cache's, if these count."""
        growth = self.sizes.accept_width * rounds
        if self.sizes.window:
            held = [s for s in self.slots.values() if not s.left]
            return sum(self.sizes.pages(len(s.text) - 1 + (growth if s.started else 0), s.started) for s in held)
        pages, lacking = self.pages.cached() if cached else set(), 0
        for slot in self.slots.values():
            if not slot.left:
                held = self.pages.of(slot.number)
                pages |= {*held.values()}
                lacking += self.sizes.pages(len(slot.text) - 1 + (growth if slot.started else 0)) - len(held)
        return len(pages) + lacking

    def take_pages(self, slot: Slot, end: int) -> None:
        """Those of all rows up to `end`, but for what is behind the window of the text so far."""
        sizes, rows = self.sizes, len(slot.text) - 1 if slot.started else slot.rows
        behind = max(0, rows - sizes.window) // sizes.page_size if sizes.window else 0
        begin, slot.end_page = slot.end_page, max(slot.end_page, -(-end // sizes.page_size))
        self.pages.take(slot.number, min(behind, slot.end_page), begin, slot.end_page)

    def assign_pages(self, sources: list[int], destinations: list[int]) -> None:
        late, self.needed_apart = self.rng.random() < 0.5, self.needed(0)
        if not late:
            self.may_fail("assign_pages")
        self.pages.assign(sources, destinations)
        if late:
            self.may_fail("assign_pages")

    def waiting(self) -> list[int]:
        held = {s.request_id for s in self.slots.values() if not s.left}
        ended = {i for i, s in self.sent.items() if s.reason or s.ended} | self.to_cancel
        return [i for i in sorted(self.visible, key=self.rank) if i not in held | ended]

    def rank(self, request_id: int) -> tuple[int, int]:
        return self.sent[request_id].priority, request_id

    def by_rank(self, slots: list[Slot]) -> list[Slot]:
        return sorted(slots, key=lambda slot: self.rank(slot.request_id))

    def may_fail(self, method: str, *request_ids: int) -> None:
        self.events.append(method)
        self.on_call()
        if self.rng.random() < self.faults.get(method, 0):
            for request_id in request_ids:
                self.sent[request_id].failed = True
            raise Fault(method)

    # --- the executor

    def begin(self, slot: int, request: tuple[int, list[int], int, object, list[int]]) -> None:
        request_id, text, group, extra, cached = request
        sent = self.sent[request_id]
        assert extra is sent.extra
        assert group == request_id % 5
        assert slot not in self.slots and 0 <= slot < self.sizes.num_slots
        assert text == sent.prompt + sent.produced, "a retracted request returns with what it produced"
        if self.visible:
            assert request_id == self.waiting()[0], "by priority, and first come, first served"
        rows, first = len(cached) * self.sizes.page_size, slot * self.sizes.max_pages
        assert not cached or (self.sizes.prefix_cache and rows < len(text)), "the root's row is left to prefill"
        state = self.slots[slot] = Slot(slot, request_id, list(text), rows, drafted=rows, told=len(text))
        state.end_page = len(cached)
        self.pages.assign(cached, [*range(first, first + len(cached))])
        self.pages.expect_text(slot, text, rows)
        assert self.needed(1) <= self.sizes.num_pages
        self.take_pages(state, 0 if self.sizes.window else len(text) - 1 + self.sizes.reserve)
        if request_id not in self.first_starts:
            self.first_starts.append(request_id)
        self.may_fail("begin", request_id)

    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        states = [self.slots[slot] for slot, _, _ in chunks]
        # The first in rank that are not prefilled, as many rows of each as there is room for.
        wanting = self.by_rank([s for s in self.slots.values() if not (s.left or s.active) and s.rows < len(s.text)])
        assert states == wanting[: len(chunks)] and len(chunks) <= self.sizes.prefill_requests
        room = self.sizes.prefill_chunk
        for state, (_, start, tokens) in zip(states, chunks, strict=True):
            count = min(room, len(state.text) - state.rows)
            assert not state.active and start == state.rows and count > 0
            assert tokens == [*state.text, state.text[-1]][start : start + count + 1]
            room -= count
            self.take_pages(state, start + count)
        assert not room or len(chunks) in (len(wanting), self.sizes.prefill_requests)
        self.may_fail("prefill", *(state.request_id for state in states))
        for state, (slot, start, tokens) in zip(states, chunks, strict=True):
            state.rows += len(tokens) - 1
            self.pages.write_text(slot, state.text, start, state.rows)
            state.drafted = min(state.rows, len(state.text) - 1)
            self.take_pages(state, state.rows)
        for other in self.slots.values():
            other.chunks_waited += other.takes_part
            late = self.stall and self.sizes.rounds_in_flight > 1  # that somebody stalled is seen when it is read
            assert other.chunks_waited <= 1 or self.sizes.max_batch < self.sizes.num_slots or self.faults or late

    def activate(self, slots: list[int]) -> None:
        states = [self.slots[slot] for slot in slots]
        starting = self.by_rank([s for s in self.slots.values() if s.active and not s.started and not s.left])
        assert states == starting[: self.sizes.prefill_requests]
        for state in states:
            self.take_pages(state, state.rows + self.sizes.reserve)
        self.may_fail("activate", *(state.request_id for state in states))
        for state in states:
            state.started = True

    def activations(self, record: np.ndarray) -> np.ndarray:
        """Slot and state of each."""
        sizes = self.sizes
        width = 13 + sizes.max_stops
        return record[-sizes.num_slots * width :].reshape(sizes.num_slots, width)[: record[1]]

    def apply_commands(self) -> list[int]:
        """The next record; returns the slots of the round."""
        sizes, record = self.sizes, self.commands[self.num_applied % DEPTH]
        self.num_applied += 1
        record[0] = self.num_applied
        slots, given_back, _ = np.split(record[2:], [sizes.max_batch, sizes.max_batch + sizes.num_slots])
        assert [*given_back] == [*given_back[given_back >= 0], *[-1] * (given_back < 0).sum()]
        for slot in given_back[given_back >= 0].tolist():
            assert self.slots.pop(slot).left
            self.pages.free(slot)
        for command in self.activations(record):
            slot, seq_len, root, remaining = command[:4].tolist()
            state = self.slots[slot]
            sent, floats = self.sent[state.request_id], command.view(np.float32)
            assert not state.active and not state.left
            assert seq_len == len(state.text) - 1 == state.rows - 1 and root == state.text[-1]
            state.rows = seq_len
            assert remaining == min(sent.max_new_tokens, sizes.max_len) - len(sent.produced) > 0
            want = self.sampling(state.request_id)
            assert [floats[4], command[5], floats[6], floats[7]] == [*want.values()][:4]
            assert command[8:10].view(np.int64) == want["seed"]
            first_stop = min(len(sent.prompt) + sent.min_new_tokens, sizes.max_len) if sent.min_new_tokens else 0
            most = sent.max_nodes or 2**31 - 1
            assert command[10:13].tolist() == [first_stop, sent.num_logprobs, most]
            assert command[13:].tolist() == (sent.stop_tokens + [-1] * sizes.max_stops)[: sizes.max_stops]
            state.active = True
        count = int((slots >= 0).sum())
        assert (slots[count:] == -1).all()
        return slots[:count].tolist()

    def launch(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        slots = self.begin_round(batch, num_rows, max_kv_len)
        constrained = any(self.sent[self.slots[slot].request_id].constrained for slot in slots)
        assert num_rows == CATCH_UP or not constrained
        if num_rows != CATCH_UP:
            self.end_round(slots, num_rows == FIRST_ROUND)
        if self.late is not None:
            self.may_fail(*self.late)

    def forward(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        self.drafted = self.begin_round(batch, num_rows, max_kv_len)
        assert any(self.sent[self.slots[slot].request_id].constrained for slot in self.drafted)
        if self.late is not None:
            self.may_fail(*self.late)

    def constrain(self, number: int, requests: list[tuple[int, int, list[int]]], batch: int, num_rows: int) -> None:
        assert number == self.num_applied and batch >= len(self.drafted)
        states = [self.slots[slot] for slot in self.drafted]
        going_on = [state for state in states if not state.finished and not state.left]
        constrained = [state for state in going_on if self.sent[state.request_id].constrained]
        assert [self.slots[slot] for _, slot, _ in requests] == constrained, "rounds before have been read"
        for row, slot, tokens in requests:
            state = self.slots[slot]
            assert self.drafted[row] == slot and tokens == state.text[state.told :]
            state.told = len(state.text)
        self.may_fail("constrain", *(state.request_id for state in going_on))

    def finish(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        self.end_round(self.drafted, num_rows == FIRST_ROUND)

    def begin_round(self, batch: int, num_rows: int, max_kv_len: int) -> list[int]:
        record = self.commands[self.num_applied % DEPTH]
        named = self.activations(record)[:, 0] if batch == 0 else record[2 : 2 + batch]
        ids = [self.slots[int(s)].request_id for s in named if s >= 0]
        method = "first round" if num_rows == FIRST_ROUND else "round" if batch else "record"
        late = self.rng.random() < 0.5  # a launch may throw before or after it has done its work
        if not late:
            self.may_fail(method, *ids)
        self.late = (method, *ids) if late else None
        slots = self.apply_commands()
        if batch == 0:
            assert not slots and num_rows == CATCH_UP and not max_kv_len
            return slots
        self.check_kv(slots, max_kv_len)
        if num_rows == FIRST_ROUND:
            self.check_first(slots, batch)
            self.rests = False
            return slots
        self.check_rows(slots, batch)
        self.check_drafting(slots, batch, num_rows)
        drafting = any(self.sent[self.slots[slot].request_id].max_nodes != 1 for slot in slots)
        self.rests = (
            self.sizes.draft_can_idle and num_rows == batch and (self.sizes.max_idle_rounds > 0 or not drafting)
        )
        return slots

    def end_round(self, slots: list[int], is_first: bool) -> None:
        result = self.results[self.num_published % DEPTH]
        result[:] = self.rng.choice([-1, 2**31 - 1])
        if self.sizes.max_idle_rounds:
            result[2:6].view(np.int64)[:] = [0, self.rng.randint(1, 100_000)]
            result[6] = 0  # nothing is learnt of levels
        for row, slot in enumerate(slots):
            state = self.slots[slot]
            self.take_pages(state, len(state.text) - 1 + self.sizes.reserve)
            state.chunks_waited = 0
            state.rounds += 1
            stalls = (row > 0 or is_first) and self.rng.random() < self.stall
            count = 1 if self.rests or is_first else self.rng.randint(1, self.sizes.accept_width)
            self.play(row, state, 0 if stalls else count, self.rests, is_first)
            self.ended_first |= is_first and state.finished
        self.num_published += 1
        self.results[(self.num_published - 1) % DEPTH, 0] = self.num_published

    def check_size(self, slots: list[int], batch: int) -> None:
        assert batch == min(b for b in self.sizes.batch_sizes if b >= len(slots)) and len(slots) == len(set(slots)) > 0

    def check_first(self, slots: list[int], batch: int) -> None:
        """All of those that begin, once each, as soon as they may."""
        self.check_size(slots, batch)
        beginning = self.by_rank([s for s in self.slots.values() if s.started and not s.begun and not s.left])
        states = [self.slots[slot] for slot in slots]
        assert states == beginning[: self.sizes.max_batch]
        for state in states:
            pages = self.pages.of(state.number)
            page, row = pages[state.rows // self.sizes.page_size], state.rows % self.sizes.page_size
            assert self.pages.rows[page][row] == hash((True, *state.text)), "prefill has written the root's row"
            state.begun = True

    def check_rows(self, slots: list[int], batch: int) -> None:
        sizes = self.sizes
        self.check_size(slots, batch)
        assert all(self.slots[s].begun and not self.slots[s].left for s in slots)
        running = [s for s, state in self.slots.items() if state.takes_part]
        if sizes.rounds_in_flight == 1:
            assert set(slots) <= set(running) and len(slots) == min(len(running), sizes.max_batch)
        elif not self.stall:
            assert set(running) <= set(slots) or len(slots) == sizes.max_batch
        waiting = [] if sizes.prefix_cache else self.waiting()  # who may wait for a prefix
        # Who has ended in this turn, or where there is a window was prefilled in it, had more pages when it was decided.
        changed = self.ended_first or (sizes.window > 0 and any(s.rounds == 1 for s in self.slots.values()))
        if waiting and len(self.slots) < sizes.num_slots and sizes.rounds_in_flight == 1 and not changed:
            first = self.sent[waiting[0]]
            pages = sizes.pages(len(first.prompt) + len(first.produced) - 1)
            assert self.needed(1) + pages > sizes.num_pages or first.cancelled, "who fits is admitted"

    def check_drafting(self, slots: list[int], batch: int, num_rows: int) -> None:
        """Whoever drafts is up to date, and nobody rests for longer than there is room for."""
        sizes, states = self.sizes, [self.slots[slot] for slot in slots]
        drafting = [s for s in states if self.sent[s.request_id].max_nodes != 1]
        if num_rows == CATCH_UP:
            assert sizes.max_idle_rounds and (self.faults or any(state.behind for state in states))
            self.num_catch_ups += 1
            for state in states:
                state.behind = 0
                if state in drafting:
                    self.pages.write_text(state.number, state.text, state.drafted, state.rows)
                    state.drafted = state.rows
            return
        budget_levels = sizes.rows[sizes.batch_sizes.index(batch)]
        assert num_rows in budget_levels if drafting or not sizes.plain_rounds else num_rows == batch
        if num_rows > batch:
            assert not any(state.behind for state in states)
        elif sizes.max_idle_rounds:
            for state in drafting:
                state.behind += 1
                assert state.behind <= sizes.max_idle_rounds

    def check_kv(self, slots: list[int], max_kv_len: int) -> None:
        """Whatever the rounds in flight accepted, which the host does not know, every row and its reserve are there."""
        sizes = self.sizes
        longest = max(self.slots[slot].rows for slot in slots) + sizes.reserve
        unknown = sizes.accept_width * (sizes.rounds_in_flight - 1)
        assert longest <= max_kv_len <= min(longest + unknown, sizes.max_len + sizes.reserve)

    def result(self, row: int) -> np.ndarray:
        """out_len, finish reason, status, num_nodes and tokens of a row of the round that is running."""
        begin = 8 + 2 * self.sizes.num_levels + row * self.sizes.row_words
        return self.results[self.num_published % DEPTH, begin : begin + self.sizes.row_words]

    def scores(self, row: int) -> np.ndarray:
        """Log-probabilities, best entries and theirs; the last row's stand first, at the record's end the first's."""
        record, words = self.results[self.num_published % DEPTH], self.sizes.score_words
        return record[len(record) - (row + 1) * words :][:words]

    def progress(self) -> tuple[int, int]:
        return self.num_applied, self.num_published

    def play(self, row: int, state: Slot, count: int, rests: bool = False, is_first: bool = False) -> None:
        """One slot's part of a round: `count` tokens, cut at a stop token, the budget or the length limit."""
        sent = self.sent[state.request_id]
        want, reason = self.expected(state.request_id)
        was_finished = state.finished
        new = [] if was_finished else want[len(sent.produced) :][:count]
        state.finished = len(sent.produced) + len(new) == len(want)
        nodes = self.rng.randint(1, 9)
        if not was_finished:
            drafts = not rests and (not self.sizes.draft_can_idle or sent.max_nodes != 1)
            self.pages.expect_text(state.number, state.text, state.rows, drafts)
        if count and not was_finished:  # a tree, of which a path is kept; at the end nobody tidies it up
            for behind in range(0 if is_first else self.sizes.reserve):
                self.pages.write(state.number, state.rows + behind, 0)
            if not state.finished:
                rows = state.rows + len(new)
                self.pages.write_text(state.number, state.text + new, state.rows, rows, not rests)
                state.drafted = state.drafted if rests else rows
        result = self.result(row)
        result[:4] = [len(new), reason if state.finished else 0, 0 if count else STALLED, nodes]
        result[4 : 4 + len(new)] = new
        width, top_n = self.sizes.accept_width, self.sizes.max_logprobs
        logprobs, top_ids, top_logprobs = np.split(self.scores(row), [width, width * (1 + top_n)])
        for j, a in enumerate(new if sent.num_logprobs >= 0 else []):
            own, ids, values = scores_of([a], sent.num_logprobs)
            logprobs.view(np.float32)[j] = own[0]
            top_ids[j * top_n :][: len(ids)] = ids
            top_logprobs.view(np.float32)[j * top_n :][: len(ids)] = values
        sent.produced += new
        state.text += new
        state.rows += len(new)
        if new and not is_first:
            sent.rounds, sent.drafted, sent.accepted = (
                sent.rounds + 1,
                sent.drafted + nodes - 1,
                sent.accepted + len(new) - 1,
            )
        self.spoil(row, sent)

    def deactivate(self, slots: list[int]) -> None:
        assert slots
        for slot in slots:
            state = self.slots[slot]
            request_id, sent = state.request_id, self.sent[state.request_id]
            assert not state.left
            cancelled = request_id in self.to_cancel if self.visible else sent.cancelled
            overdue = 1 < sent.timeout_ns < 10**9  # or may be: time is not the model's
            sent.ended = state.finished or cancelled or sent.failed or overdue
            if not sent.ended:
                last = self.by_rank([other for other in self.slots.values() if not other.left])[-1].number
                needed = max(self.needed(0), self.needed_apart)  # it may have come to share pages since
                in_want = needed > self.sizes.num_pages or self.faults.get("assign_pages")
                assert slot == last and in_want, "only the last in rank, in want of pages"
                self.retracted.append(request_id)
            state.left = True
        self.needed_apart = 0
        self.may_fail("deactivate")

    # --- what comes out

    def emit(self, emissions: list[tuple[Any, ...]]) -> None:
        if emissions:
            self.events.append("emit")
        for request_id, tokens, reason, *counts, status, scores, error in emissions:
            sent = self.sent[request_id]
            assert scores == (None if sent.num_logprobs < 0 else scores_of(tokens, sent.num_logprobs))
            assert not sent.reason, "nothing follows the last emission"
            assert reason or (tokens and self.streams)
            assert (error is not None) == (reason == ERROR and not status)
            assert counts.pop() < len(sent.prompt)
            sent.emitted += tokens
            sent.reason, sent.status, sent.counts, sent.error = reason, status, tuple(counts), error
            assert sent.emitted == sent.produced[: len(sent.emitted)]
            if reason:
                assert request_id not in {s.request_id for s in self.slots.values() if not s.left}
        for sent in (self.sent[emission[0]] for emission in emissions):
            up_to_date = self.sizes.rounds_in_flight == 1 and not self.driven
            if sent.reason not in (ERROR, CANCELLED, TIMEOUT) and (sent.reason or (up_to_date and not sent.failed)):
                assert sent.emitted == sent.produced and sent.counts == (sent.rounds, sent.drafted, sent.accepted)


def any_device(seed: int, rounds_in_flight: int = 1) -> Device:
    device = Device(Sizes.random(random.Random(seed), rounds_in_flight), seed)
    device.streams = device.rng.random() < 0.7
    device.priorities = device.rng.choice([[0], [0], [1, 0], [2, -7, 0, 0, 2]])
    return device


# --- random mixes

MIXES = 500
overlapped = pytest.mark.parametrize("rounds_in_flight", [1, 2, 3])


@overlapped
@pytest.mark.parametrize("batch", range(4))
def test_mixes(batch: int, rounds_in_flight: int) -> None:
    retractions = 0
    for seed in range(batch * MIXES, (batch + 1) * MIXES):
        device = any_device(seed, rounds_in_flight)
        device.stall = device.rng.choice([0, 0, 0.3])
        for _ in range(device.rng.randint(1, 10)):
            device.submit_any()
            for _ in range(device.rng.choice([0, 0, 1, 5])):
                device.step()
        device.run()
        assert sorted(device.first_starts) == sorted(device.sent)
        for priority in {*device.priorities}:
            begun = [i for i in device.first_starts if device.sent[i].priority == priority]
            assert begun == sorted(begun), "first come, first served"
        retractions += len(device.retracted)
    assert retractions > 60


@overlapped
@pytest.mark.parametrize("batch", range(2))
def test_mixes_with_cancels_and_submits_anywhere(batch: int, rounds_in_flight: int) -> None:
    reasons = set()
    for seed in range(batch * MIXES, (batch + 1) * MIXES):
        device = any_device(seed, rounds_in_flight)
        rng = device.rng

        def meddle(device: Device = device, rng: random.Random = rng) -> None:
            if rng.random() < 0.1:
                device.cancel(rng.randrange(len(device.sent)))
            if rng.random() < 0.1 and len(device.sent) < 20:
                device.submit_any()

        device.on_call = meddle
        device.timeouts = rng.choice([[0], [0, 0, 1], [3600 * 10**9, 0]])
        for _ in range(rng.randint(1, 10)):
            device.submit_any()
            if rng.random() < 0.3:
                device.cancel(rng.randrange(len(device.sent)))
            for _ in range(rng.choice([0, 1, 3])):
                device.step()
        device.run()
        reasons |= {s.reason for s in device.sent.values()}
    assert reasons == {STOP, LENGTH, CONTEXT, CANCELLED, TIMEOUT}


METHODS = ["begin", "prefill", "record", "activate", "first round", "round", "constrain", "deactivate", "assign_pages"]


@overlapped
@pytest.mark.parametrize("method", METHODS)
def test_mixes_with_exceptions(method: str, rounds_in_flight: int) -> None:
    """Whatever raises, the exception comes out, its requests end with an error, and the others lose nothing."""
    faults = 0
    for seed in range(300):
        device = any_device(seed, rounds_in_flight)
        device.faults = {method: 0.15}
        for _ in range(device.rng.randint(1, 10)):
            device.submit_any()
        while True:
            try:
                if not device.step():
                    break
            except Fault as fault:
                assert str(fault) == method
                faults += 1
        device.check_all_done()
        for sent in device.sent.values():
            assert sent.failed == (sent.reason == ERROR) and sent.status == 0
            assert not sent.failed or str(sent.error) == method
    assert faults > 100


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.builds(Sizes.random, st.randoms(use_true_random=False), st.integers(1, 3)),
    plan=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 39), st.integers(1, 40)),
            st.tuples(st.just("submit_many"), st.integers(0, 6), st.integers(1, 40)),
            st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 8), st.just(0)),
        ),
        max_size=25,
    ),
)
def test_plans(sizes: Sizes, plan: list[tuple[str, int, int]]) -> None:
    device = Device(sizes)
    for verb, a, b in plan:
        if verb == "submit":
            device.submit([a] * min(a, sizes.max_len - 1), b)
        elif verb == "submit_many":
            first = len(device.sent)
            ids = device.submit_many([([b] * min(i + 1, sizes.max_len - 1), b, []) for i in range(a)])
            assert ids == [*range(first, first + a)]
        elif verb == "cancel" and a in device.sent:
            device.cancel(a)
        elif verb == "step":
            for _ in range(a):
                device.step()
    device.run()


# --- one rule at a time


def test_retraction_and_return() -> None:
    sizes = Sizes(num_slots=2, num_pages=8, page_size=4, max_len=24, reserve=6, accept_width=4, batch_sizes=(1, 2))
    device = Device(sizes)
    assert sizes.pages(sizes.max_len) == sizes.num_pages, "the smallest legal pool"
    old, new = device.submit([1, 2], 20), device.submit([3], 20)
    device.run()
    assert device.retracted and set(device.retracted) == {new}
    assert len(device.sent[old].emitted) == len(device.sent[new].emitted) == 20


def test_priorities_order_the_queue() -> None:
    """And nothing else: who has the slot keeps it, whoever comes."""
    device = Device(Sizes(num_slots=1, batch_sizes=(1,)))
    device.priorities = [5, 5, 0, 5, -3, 0, 9]
    device.submit([1], 9)
    device.step()
    for _ in range(4):
        device.submit([1], 2)
    device.step()
    for _ in range(2):
        device.submit([1], 2)
    device.run()
    assert device.first_starts == [0, 4, 2, 5, 1, 3, 6] and not device.retracted


def test_who_does_not_fit_holds_up_lower_priorities() -> None:
    """A long prompt of a high priority is not passed by short ones of a lower one for which there would be room."""
    device = Device(Sizes(num_slots=3, num_pages=9, max_len=24))
    device.priorities = [0, 1, 0]
    device.submit([1] * 10, 8)
    device.step()
    device.submit([1], 1)
    device.submit([1] * 20, 1)
    device.run()
    assert device.first_starts == [0, 2, 1]


def test_the_lowest_priority_is_retracted() -> None:
    """Not the newest; and it is back before others of its priority, behind those of a higher one."""
    sizes = Sizes(num_slots=2, num_pages=8, page_size=4, max_len=24, reserve=6, accept_width=4, batch_sizes=(1, 2))
    device = Device(sizes)
    device.priorities = [1, 0, 1, 0]
    low, high = device.submit([1, 2], 20), device.submit([3], 20)
    device.step()
    later, late = device.submit([4], 1), device.submit([5], 1)
    starts: list[int] = []
    begin = device.begin
    device.begin = lambda slot, request: (starts.append(request[0]), begin(slot, request))[1]  # type: ignore[method-assign]
    device.run()
    assert device.retracted and set(device.retracted) == {low}
    assert device.first_starts == [high, low, late, later] and starts.index(low) < starts.index(later)
    assert len(device.sent[low].emitted) == len(device.sent[high].emitted) == 20


def test_a_prompt_of_a_higher_priority_is_prefilled_first() -> None:
    device = Device(Sizes(prefill_chunk=4, num_slots=2, batch_sizes=(1, 2)))
    device.priorities = [1, 0]
    calls: list[list[int]] = []
    prefill = device.prefill
    device.prefill = lambda chunks: (calls.append([slot for slot, _, _ in chunks]), prefill(chunks))[1]  # type: ignore[method-assign]
    device.submit([1] * 12, 2)
    device.step()
    device.submit([1] * 8, 2)
    device.run()
    assert calls == [[0], [1], [1], [0], [0]]


def test_a_request_that_cannot_begin_in_time_never_does() -> None:
    device = Device(Sizes(num_slots=1, batch_sizes=(1,)))
    device.timeouts = [0, 1, 3600 * 10**9]
    for _ in range(3):
        device.submit([1, 2], 5)
    device.run()
    assert device.first_starts == [0, 2]
    assert [sent.reason for sent in device.sent.values()] == [LENGTH, TIMEOUT, LENGTH]


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_a_request_ends_with_its_time(rounds_in_flight: int) -> None:
    """Wherever it is: with a slot, or retracted, or behind others. What came until then it has; nobody else is touched."""
    sizes = Sizes(num_slots=2, num_pages=300, max_len=1000, accept_width=1, rounds_in_flight=rounds_in_flight)
    device = Device(Sizes(**vars(sizes) | {"batch_sizes": (1, 2), "rows": ()}))
    device.timeouts = [0, 20_000_000, 20_000_000]
    for _ in range(3):
        device.submit([1, 2], 900)
    for _ in range(5):
        device.step_alone()
    time.sleep(0.03)
    while device.step_alone():
        pass
    device.check_all_done()
    other, running, waiting = device.sent.values()
    assert (other.reason, running.reason, waiting.reason) == (LENGTH, TIMEOUT, TIMEOUT)
    assert len(other.emitted) == 900 > len(running.emitted) and not waiting.emitted


def test_a_window_of_a_text_beyond_the_pool() -> None:
    """What is behind the window counts no more: all run, and are retracted only where windows do not fit side by side."""
    sizes = Sizes(num_slots=3, num_pages=16, max_len=400, window=7, prefill_chunk=6)
    assert sizes.pages(sizes.max_len) == 5 and sizes.pages(sizes.max_len, started=True) == 5
    device = Device(sizes)
    for length in (300, 1, 399, 150):
        device.submit([1] * length, 1000)
    device.run()
    assert not device.retracted and [len(sent.emitted) for sent in device.sent.values()] == [100, 399, 1, 250]


def test_chunks_follow_each_other_until_someone_decodes() -> None:
    device = Device(Sizes(prefill_chunk=2))
    device.submit([1] * 8, 1000)
    for _ in range(4):
        device.step()
    begins = ["record", "activate", "first round", "emit"]
    assert device.events == ["begin", "prefill", "prefill", "prefill", "prefill", *begins[:-1], "round", "emit"]
    device.events.clear()
    device.submit([1] * 4, 1000)
    device.step()
    device.step()
    assert device.events == ["begin", "prefill", "round", "emit", "prefill", *begins[:-1], "round", "emit"]


def test_prompts_share_a_call() -> None:
    """A prompt is cut where the call is full; who is prefilled starts, and the others go on."""
    device = Device(Sizes(prefill_chunk=7, prefill_requests=3))
    for length in (3, 7, 2):
        device.submit([1] * length, 1000)
    calls: list[list[tuple[int, int, int]]] = []
    prefill = device.prefill

    def note(chunks: list[tuple[int, int, list[int]]]) -> None:
        calls.append([(slot, start, len(tokens) - 1) for slot, start, tokens in chunks])
        prefill(chunks)

    device.prefill = note  # type: ignore[method-assign]
    device.step()
    device.step()
    assert calls == [[(0, 0, 3), (1, 0, 4)], [(1, 4, 3), (2, 0, 2)]]
    assert device.events == [
        *["begin", "begin", "begin", "prefill", "record", "activate", "first round", "round", "emit"],
        *["prefill", "record", "activate", "first round", "round", "emit"],
    ]


def test_a_round_behind_a_pass_knows_of_those_before() -> None:
    """They are read while the device is at the pass."""
    device = Device(Sizes(rounds_in_flight=2, accept_width=1, batch_sizes=(1, 2, 3)))
    device.submit([1] * 4, 9, [token(0, 6)])  # ends with the second round behind its first one
    rows: list[list[int]] = []
    check_rows = device.check_rows
    device.check_rows = lambda slots, batch: (rows.append(slots), check_rows(slots, batch))  # type: ignore[method-assign]
    device.step()
    device.step()
    device.submit([1] * 4, 2)
    device.step()
    assert rows == [[0], [0], [1]]
    device.run()


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_a_prompt_costs_a_pass_and_a_first_round(rounds_in_flight: int) -> None:
    """One of a single token, too. Who wants no more has ended with that."""
    device = Device(Sizes(rounds_in_flight=rounds_in_flight))
    device.submit([5], 1)
    assert not device.step()
    assert device.events == ["begin", "prefill", "record", "activate", "first round", "deactivate", "record", "emit"]
    assert device.sent[0].counts == (0, 0, 0) and device.scheduler.times[:2] == (0, 0)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_first_tokens_come_before_the_next_round_is_read(rounds_in_flight: int) -> None:
    """Of all that were prefilled in one pass with one round; with no round beside it they are out before the next one."""
    device = Device(Sizes(rounds_in_flight=rounds_in_flight, prefill_chunk=9))
    for length in (4, 1, 3):
        device.submit([1] * length, 9)
    emitted: list[int] = []
    check_rows = device.check_rows

    def check(slots: list[int], batch: int) -> None:
        device.emit(device.scheduler.take(wait=False) or [])
        emitted.append(sum(len(sent.emitted) for sent in device.sent.values()))
        check_rows(slots, batch)

    device.driven, device.check_rows = True, check  # type: ignore[method-assign]
    device.step()
    assert [event for event in device.events if event != "emit"] == [
        *["begin", "begin", "begin", "prefill", "record", "activate", "first round", "round"],
    ]
    assert emitted == [3 if rounds_in_flight == 1 else 0]
    assert all(sent.emitted for sent in device.sent.values())
    device.run()


def test_first_rounds_are_no_larger_than_others() -> None:
    device = Device(Sizes(num_slots=3, batch_sizes=(1, 2), prefill_chunk=9))
    for _ in range(3):
        device.submit([1], 2)
    device.step()
    assert device.events.count("first round") == 2 and device.events.count("prefill") == 1
    device.run()


def test_who_stalls_in_a_first_round_begins_with_another() -> None:
    device = Device(Sizes(num_slots=1, batch_sizes=(1,)))
    play = device.play
    device.play = lambda row, state, count, rests, is_first: play(row, state, 0 if is_first else count, rests, is_first)  # type: ignore[method-assign]
    device.submit([1, 2], 5)
    device.run()
    assert len(device.sent[0].emitted) == 5 and sum(device.sent[0].counts[::2]) == 5
    assert device.events.count("first round") == 1


def test_small_rounds_take_turns() -> None:
    device = Device(Sizes(num_slots=3, batch_sizes=(1,), accept_width=1, max_len=100))
    for _ in range(3):
        device.submit([7], 5)
    for turn in range(1, 13):
        device.step()
        lengths = [len(s.emitted) for s in device.sent.values()]
        assert sum(lengths) == min(turn + 3, 15) and max(lengths) - min(lengths) <= 1


def test_bad_status_ends_one_request() -> None:
    device = Device(Sizes())
    bad, good = device.submit([1, 2], 9), device.submit([3], 9)

    def spoil(row: int, sent: Sent) -> None:
        if sent is device.sent[bad] and len(sent.produced) > 2:
            device.result(row)[2] |= BAD_TREE | STALLED
            sent.failed = True

    device.spoil = spoil
    device.run()
    assert (device.sent[bad].reason, device.sent[bad].status) == (ERROR, BAD_TREE)
    assert device.sent[good].reason == LENGTH


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 5), (0, -1), (0, 2**31 - 1), (4, -1), (1, 4), (1, -1)],
    ids=["out_len", "negative-out_len", "huge-out_len", "token", "reason", "negative-reason"],
)
def test_results_out_of_range_end_one_request(word: int, value: int) -> None:
    device = Device(Sizes())
    bad, good = device.submit([1], 9), device.submit([3], 9)

    def spoil(row: int, sent: Sent) -> None:
        if sent is device.sent[bad]:
            device.result(row)[word] = value
            sent.failed = True

    device.spoil = spoil
    device.run()
    assert (device.sent[bad].reason, device.sent[bad].status, device.sent[bad].emitted) == (ERROR, BAD_LENGTH, [])
    assert device.sent[good].reason == LENGTH


def test_a_round_that_goes_nowhere_ends_the_newest() -> None:
    """Pages that were counted and are not there: the loop gives way instead of spinning."""
    device = Device(Sizes())
    first, second = device.submit([1], 9), device.submit([2], 9)
    device.sent[second].failed = True
    play = device.play
    device.play = lambda row, state, count, *kind: play(row, state, count if device.sent[second].reason else 0, *kind)  # type: ignore[method-assign]
    device.run()
    assert (device.sent[second].reason, device.sent[second].status) == (ERROR, STALLED)
    assert device.sent[first].reason == LENGTH


def test_stop() -> None:
    device = Device(Sizes())
    for _ in range(6):
        device.submit([1, 2, 3], 1000)
    device.step()
    device.scheduler.stop()
    for sent in device.sent.values():
        sent.cancelled = True
    assert not device.step()
    assert {s.reason for s in device.sent.values()} == {CANCELLED}
    device.check_all_done()
    with pytest.raises(RuntimeError, match=r"^submit: the scheduler has been stopped, expected one that runs$"):
        device.scheduler.submit([1], 1)
    device.scheduler.run()  # which returns at once, for good
    with pytest.raises(RuntimeError, match=r"^pause: the scheduler has been stopped, expected one that runs$"):
        device.scheduler.pause()
    with pytest.raises(RuntimeError, match=r"^submit_many: the scheduler has been stopped, expected one that runs$"):
        device.scheduler.submit_many([submission([1], 1)] * 2)
    device.scheduler.run()
    assert device.scheduler.take() is None


def test_idle_and_unknown() -> None:
    device = Device(Sizes())
    assert not device.step()
    assert not device.scheduler.cancel(0) and device.scheduler.take(wait=False) == []
    device.submit([1], 1)
    device.run()
    assert not device.scheduler.cancel(0) and device.scheduler.take(wait=False) == []


@pytest.mark.parametrize("fault", ["progress", "record"])
def test_a_device_that_is_gone(fault: str) -> None:
    """It cannot say how far it came, or no launch succeeds: all requests end, those to come too, and are told why."""
    device = Device(Sizes())
    for _ in range(5):
        device.submit([1], 9)
    device.step()

    def launch(batch: int, *_sizes: int) -> None:
        raise Fault("round" if batch else "record")

    def progress() -> tuple[int, int]:
        device.slots.clear()
        raise Fault("progress")

    device.launch = launch  # type: ignore[method-assign]
    for sent in device.sent.values():
        sent.failed = True
    if fault == "progress":
        device.progress = progress  # type: ignore[method-assign]
    faults = 0
    while True:
        try:
            if not device.step_alone():
                break
        except Fault:
            faults += 1
    assert faults == {"progress": 1, "record": 8}[fault]
    assert [(sent.reason, str(sent.error)) for sent in device.sent.values()] == [(ERROR, "round")] * 3 + [
        (ERROR, fault)
    ] * 2
    late = device.submit([1], 1)
    assert not device.step_alone() and device.sent[late].reason == ERROR
    assert device.scheduler.num_running == device.scheduler.num_waiting == 0


def test_int32_tensors_are_prompts_too() -> None:
    device = Device(Sizes())
    arguments: Any = np.array([4, 5], np.int32), 2, np.array([], np.int32)
    request_id = device.scheduler.submit(*arguments, **device.sampling(0))
    others = [submission(*arguments, **device.sampling(i), ngram_group=i) for i in (1, 2)]
    for number in (request_id, *device.scheduler.submit_many(others)):
        device.sent[number] = Sent([4, 5], 2, [])
    assert [*device.sent] == [0, 1, 2]
    device.run()


# --- threads, signals, lifetime


def test_submit_and_cancel_from_threads() -> None:
    device = Device(Sizes(num_slots=5, batch_sizes=(2, 5), num_pages=20))
    lock, per_thread = threading.Lock(), 60

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(per_thread):
            with lock:  # the model's table must know a request before the loop does
                request_id = device.submit_any()
            if rng.random() < 0.3:
                victim = rng.choice([request_id, rng.randrange(request_id + 1)])
                device.sent[victim].cancelled = True
                device.scheduler.cancel(victim)

    original = device.begin

    def begin(slot: int, request: tuple[int, list[int], int, object]) -> None:
        with lock:
            original(slot, request)

    device.begin = begin  # type: ignore[method-assign]
    device.driven = True
    failures: list[BaseException] = []

    def serve(method: Any) -> None:
        try:
            method()
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        while (emissions := device.scheduler.take()) is not None:
            device.emit(emissions)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    servers = [threading.Thread(target=serve, args=(method,)) for method in (device.scheduler.run, read)]
    for thread in [*servers, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    while device.scheduler.num_waiting or device.scheduler.num_running:
        assert servers[0].is_alive()
        time.sleep(0.001)
    device.scheduler.stop()
    for thread in servers:
        thread.join()
    assert not failures
    assert len(device.sent) == 4 * per_thread
    device.check_all_done()


def test_who_is_submitted_together_joins_together() -> None:
    """Whatever the loop is at: it has all of them in its next turn, and their first round is one round."""
    device = Device(Sizes(max_len=40, prefill_chunk=30))
    device.driven = True
    rounds: list[int] = []
    check_rows = device.check_rows
    device.check_rows = lambda slots, batch: (rounds.append(len(slots)), check_rows(slots, batch))  # type: ignore
    lock = threading.Lock()
    begin = device.begin

    def begin_when_known(slot: int, request: tuple[int, list[int], int, object]) -> None:
        with lock:  # the model's table must know a request before the loop does
            begin(slot, request)

    device.begin = begin_when_known  # type: ignore[method-assign]
    thread = threading.Thread(target=device.scheduler.run)
    thread.start()
    for _ in range(100):
        rounds.clear()
        with lock:
            ids = device.submit_many([([1, 2, 3], 2, [])] * 3)
        while not all(device.sent[request_id].reason for request_id in ids):
            device.emit(device.scheduler.take() or [])
        assert rounds[0] == 3
    device.scheduler.stop()
    thread.join(10)
    device.check_all_done()


def test_run_waits_for_work_and_goes_on_after_exceptions() -> None:
    """What its requests are told is told once; what nobody is told comes out."""
    device = Device(Sizes())
    device.driven = True
    raised: list[str] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            try:
                device.scheduler.run()
                ended.set()
            except Fault as fault:
                raised.append(str(fault))

    thread = threading.Thread(target=run)
    thread.start()
    reasons = []
    for fault in ("", "prefill", "", "deactivate", ""):
        device.faults = {fault: 1.0}
        request_id = device.submit([1, 2], 3)
        while not device.sent[request_id].reason:
            emissions = device.scheduler.take()
            assert emissions
            device.emit(emissions)
        device.faults = {}
        reasons.append((device.sent[request_id].reason, str(device.sent[request_id].error)))
    device.scheduler.stop()
    thread.join(10)
    assert ended.is_set() and device.scheduler.take() is None
    assert reasons == [(LENGTH, "None"), (ERROR, "prefill"), *3 * [(LENGTH, "None")]]
    assert raised == ["deactivate"]


def test_one_loop_at_a_time() -> None:
    device = Device(Sizes())
    messages = []

    def step_again() -> None:
        for method in (device.scheduler.step, device.scheduler.run):
            with pytest.raises(RuntimeError) as error:
                method()
            messages.append(str(error.value))

    device.on_call = step_again
    device.submit([1], 1)
    device.run()
    assert set(messages) == {"step: the loop is running already, expected one at a time"}


def test_an_engine_and_its_scheduler_are_collected() -> None:
    device = Device(Sizes())
    alive = weakref.ref(device)
    del device
    gc.collect()
    assert alive() is None


# --- messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "submit: prompt is empty, expected at least 1 token"),
        (([1] * 24, 1), "submit: prompt has 24 tokens, expected at most 23 (max_len - 1)"),
        (([1, -5], 1), "submit: prompt[1] is -5, expected 0 to 2147483647"),
        (([2**31], 1), "submit: prompt[0] is 2147483648, expected 0 to 2147483647"),
        (([1], 0), "submit: max_new_tokens is 0, expected at least 1"),
        (([1], 1, [3, -1]), "submit: stop_tokens[1] is -1, expected 0 to 2147483647"),
        (([1], 1, [3, 4, 5]), "submit: stop_tokens has 3 entries, expected at most 2"),
        (([1], 1, [], {"priority": 2**31}), "submit: priority is 2147483648, expected -2147483648 to 2147483647"),
        (([1], 1, [], {"ngram_group": -1}), "submit: ngram_group is -1, expected 0 to 2147483647"),
        ((np.zeros((2, 2), np.int32), 1), "submit: prompt has shape [2, 2], expected [length]"),
        ((np.zeros(2, np.int64), 1), "submit: prompt is int64, expected int32"),
    ],
)
def test_submit_messages(arguments: Any, message: str) -> None:
    device = Device(Sizes())
    *arguments, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError) as error:
        device.scheduler.submit(*arguments, **options)
    assert str(error.value) == message
    good, bad = submission([1], 1), submission(*arguments, **options)
    with pytest.raises(ValueError) as error:  # none of them is submitted, and the first that is refused is named
        device.scheduler.submit_many([good, bad, good, bad])
    assert str(error.value) == message.replace("submit: ", "submit_many: requests[1]: ")
    assert device.scheduler.num_waiting == 0 and device.submit_any() == 0


def test_submit_wants_ints() -> None:
    device = Device(Sizes())
    with pytest.raises(TypeError, match=r"^submit: prompt holds other things, expected ints$"):
        device.scheduler.submit(["a"], 1)
    with pytest.raises(TypeError, match=r"^submit: prompt is a str, expected a tensor"):
        device.scheduler.submit("text", 1)
    good = submission([1], 1)
    for bad in (good[:-1], (*good, 1), submission([1], "1"), submission([1], 2**63), 1, "twelve chars"):
        with pytest.raises(TypeError) as error:
            device.scheduler.submit_many([good, bad])
        assert str(error.value) == "submit_many: requests[1] is of other things, expected the arguments of submit"
    with pytest.raises(TypeError, match=r"^submit_many: requests\[0\]: stop_tokens holds other things, expected ints$"):
        device.scheduler.submit_many([submission([1], 1, ["a"])])
    assert device.scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "Scheduler: num_slots is 0, expected 1 to 1048576"),
        ({"num_slots": 2**31 - 1}, "Scheduler: num_slots is 2147483647, expected 1 to 1048576"),
        ({"accept_width": 2**31 - 1}, "Scheduler: accept_width is 2147483647, expected 1 to 65536"),
        ({"max_logprobs": 2**31 - 1}, "Scheduler: max_logprobs is 2147483647, expected -1 to 65536"),
        ({"page_size": 0}, "Scheduler: page_size is 0, expected 1 to 2147483647"),
        ({"window": -1}, "Scheduler: window is -1, expected 0 to 2147483647"),
        ({"max_len": 1}, "Scheduler: max_len is 1, expected 2 to 2147483647"),
        ({"reserve": 4}, "Scheduler: reserve is 4, expected 5 to 2147483647"),
        ({"prefill_chunk": 0}, "Scheduler: prefill_chunk is 0, expected 1 to 2147483647"),
        ({"prefill_requests": 0}, "Scheduler: prefill_requests is 0, expected 1 to 2147483647"),
        ({"max_stops": -1}, "Scheduler: max_stops is -1, expected 0 to 65536"),
        ({"rounds_in_flight": 0}, "Scheduler: rounds_in_flight is 0, expected 1 to 64"),
        ({"batch_sizes": []}, "Scheduler: batch_sizes is empty, expected at least 1 size"),
        ({"batch_sizes": [1, 4]}, "Scheduler: batch_sizes (increasing) is 4, expected 2 to 3"),
        ({"batch_sizes": [2, 2]}, "Scheduler: batch_sizes (increasing) is 2, expected 3 to 3"),
        ({"rows": []}, "Scheduler: rows has 0 lists, expected 3 like batch_sizes"),
        ({"rows": [[1], [2], []]}, "Scheduler: rows[2] is [], expected increasing values from 3 on, at least a row per request"),
        ({"rows": [[1], [1], [3]]}, "Scheduler: rows[1] is [1], expected increasing values from 2 on, at least a row per request"),
        ({"rows": [[4, 4], [8], [12]]},
         "Scheduler: rows[0] is [4, 4], expected increasing values from 1 on, at least a row per request"),
        ({"rows": [[1], [2], [2**31]]}, "Scheduler: rows (the most) is 2147483648, expected 1 to 2147483647"),
        ({"rows": [[1], [2], [*range(3, 36)]]}, "Scheduler: rows (how many of a batch size) is 33, expected 0 to 32"),
        ({"max_idle_rounds": -1}, "Scheduler: max_idle_rounds is -1, expected 0 to 2147483647"),
        ({"max_idle_rounds": 8},
         "Scheduler: max_idle_rounds is 8, expected 0 (rounds of 1 requests have 4 rows at least, "
         "and a draft is idle only in those of one each)"),
        ({"num_pages": 7}, "Scheduler: num_pages is 7, expected 8 to 2147483647 (one sequence of max_len tokens must fit)"),
        ({"commands": np.zeros((5, 20), np.int32)}, "Scheduler: commands.shape[1] is 20, expected 53 to 2147483647"),
        ({"commands": np.zeros((1, 53), np.int32)}, "Scheduler: commands.shape[0] is 1, expected 2 to 2147483647"),
        ({"results": np.zeros((1, 92), np.int32)}, "Scheduler: results.shape[0] is 1, expected 2 to 2147483647"),
        ({"results": np.zeros((5, 91), np.int32)}, "Scheduler: results.shape[1] is 91, expected 92 to 2147483647"),
        ({"results": np.zeros((5, 92), np.int64)}, "Scheduler: results is int64, expected int32"),
        ({"graphs": {(1, 4, 9): [1]}}, "Scheduler: stream is None, expected the stream that graphs are launched on"),
    ],
)  # fmt: skip
def test_constructor_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        _C.Scheduler(None, **{**vars(Sizes()), **rings(Sizes()), **change})
    assert str(error.value) == message


def test_the_largest_budgets() -> None:
    device, most = Device(Sizes()), 2**63 - 1
    request = device.scheduler.submit([1, 2], most, (), **device.sampling(0), min_new_tokens=most)
    device.sent[request] = Sent([1, 2], most, [], min_new_tokens=most)
    while device.step():
        pass
    assert device.sent[request].reason == 3  # the context is full


def test_a_device_that_forgets_to_publish() -> None:
    """The loop does not wait for ever, and goes on with the others."""
    device = Device(Sizes())
    lost = device.submit([1], 9)
    device.sent[lost].failed = True
    launch = device.launch
    device.launch = lambda *size: launch(*size) if size[0] == 0 else None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="step: the device is idle and a record is missing, expected launch to"):
        device.step()
    device.launch = launch  # type: ignore[method-assign]
    device.submit([2], 9)
    device.run()
    assert device.sent[lost].reason == ERROR


def test_gaps_between_rounds() -> None:
    """On the device's clock, and only where one round followed another at once."""
    device = Device(Sizes(rounds_in_flight=2, accept_width=1, reserve=6))

    def stamp(_row: int, _sent: Sent) -> None:
        begin = 1000 * (device.num_published + 1)
        device.results[device.num_published % DEPTH, 2:6].view(np.int64)[:] = [begin, begin + 900]

    device.spoil = stamp
    device.submit([1], 6)
    device.run()
    *_, in_rounds, following, gaps = device.scheduler.times
    assert (in_rounds, following, gaps) == (5 * 900, 4 * 900, 4 * 100), "the first one is no measure of others"


@overlapped
def test_streams_or_not(rounds_in_flight: int) -> None:
    """Who does not stream is heard of once, at the end."""
    device = Device(Sizes(rounds_in_flight=rounds_in_flight))
    device.streams = False
    quiet = device.submit([1], 9)
    device.run()
    assert device.events.count("emit") == 1 and len(device.sent[quiet].emitted) == 9


@pytest.mark.parametrize(("rounds_in_flight", "late"), [(1, 0), (2, 1), (3, 2)])
def test_results_are_read_late(rounds_in_flight: int, late: int) -> None:
    device = Device(Sizes(rounds_in_flight=rounds_in_flight, accept_width=1, reserve=6))
    device.submit([1], 9)
    for turn in range(1, 9):  # the first turn has the first round, too
        device.step()
        assert device.num_published == min(turn + 1, 9)
        assert len(device.sent[0].emitted) == max(turn + 1 - late, 0)
    device.run()
    assert device.num_published == 9, "nobody launches a round for a request whose budget is spent in flight"


def test_times_and_trace(tmp_path: Path) -> None:
    device = Device(Sizes(rounds_in_flight=2))
    device.submit([1, 2, 3], 9)
    device.run()
    rounds, rows, host, wait, prefill, *_ = device.scheduler.times
    assert rounds == rows == device.num_published - 1 > 0 and min(host, prefill) > 0 and wait == 0
    device.scheduler.write_trace(str(tmp_path / "none.json"))  # it was not to be kept
    traced = _C.Scheduler(None, **vars(Sizes()), **rings(Sizes()), trace=True)
    traced.step()
    traced.write_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["admit", "plan", "turn"]
    assert not [e for e in json.loads((tmp_path / "none.json").read_text())["traceEvents"] if e["ph"] == "X"]
