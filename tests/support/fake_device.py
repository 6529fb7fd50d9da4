"""A model of the device that holds the scheduler to its contract."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_kernels import _C

STOP, LENGTH, CONTEXT, CANCELLED, ERROR, TIMEOUT = 1, 2, 3, 4, 5, 6
STALLED, BAD_TREE, BAD_LENGTH = 1, 2, 8
CATCH_UP, FIRST_ROUND = _C.CATCH_UP, _C.FIRST_ROUND


SIZES: dict[str, Any] = {
    **{"num_slots": 3, "num_pages": 64, "page_size": 4, "max_len": 24, "reserve": 6, "accept_width": 4, "max_stops": 2},
    **{"prefill_chunk": 5, "prefill_requests": 3, "max_logprobs": 2, "rounds_in_flight": 1, "batch_sizes": (1, 2, 3)},
}


class Sizes:
    """A scheduler's sizes, small unless given. Without `rows` a round has 4 for each request."""

    def __init__(self, **fields: Any) -> None:
        self.fields = SIZES | fields
        self.fields.setdefault("rows", [[4 * batch] for batch in self.fields["batch_sizes"]])
        self.config = _C.SchedulerConfig(**self.fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def __repr__(self) -> str:
        return f"Sizes({self.fields})"

    def pages(self, rows: int, started: bool = False) -> int:
        whole = -(-(min(rows, self.max_len) + self.reserve) // self.page_size)
        ahead = self.reserve if started else max(self.reserve, self.prefill_chunk)
        return min(whole, -(-(self.window + ahead) // self.page_size) + 1) if self.window else whole

    @property
    def max_pages(self) -> int:
        return -(-(self.max_len + self.reserve) // self.page_size)

    @property
    def row_words(self) -> int:
        return 4 + self.accept_width

    @property
    def score_words(self) -> int:
        return self.accept_width * (1 + 2 * self.max_logprobs) if self.max_logprobs >= 0 else 0

    @staticmethod
    def random(rng: random.Random, rounds_in_flight: int = 1, snapshots: bool = False) -> Sizes:
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
        if snapshots:
            kept = {"prefix_cache": True, "window": 0} | {
                "num_snapshots": rng.choice([1, 2, 3, 8]),
                "snapshot_pages": rng.choice([1, 2, 5]),
            }
            sizes = Sizes(**sizes.fields | kept)
        smallest = sizes.pages(max_len)
        return Sizes(**{**sizes.fields, "num_pages": rng.choice([smallest, smallest + 1, 2 * smallest, 9 * smallest])})


def token(request_id: int, position: int) -> int:
    """Return the token of a request at a position, so that a lost or repeated token is seen."""
    return (request_id * 7919 + position * 104729) % 997


def scores_of(tokens: list[int], num_logprobs: int) -> tuple[list[float], list[int], list[float]]:
    """Those of tokens, by their values: own log-probability, best entries and theirs."""
    tops = [token + i for token in tokens for i in range(num_logprobs)]
    return [token / -4 for token in tokens], tops, [token / -8 for token in tops]


class Pages:
    """The device's pages: who owns them, and what stands in each row of each.

    A row is known by the tokens up to it, as the last layer of a target would know it, and by the next one, too,
    where a draft head has written its own. 0 is what nobody may read.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.entries: dict[int, int] = {}  # of the page table: slots' rows first, then the cache's places
        self.owners = [0] * sizes.num_pages
        self.rows = [[0] * sizes.page_size for _ in self.owners]
        self.first_place = sizes.num_slots * sizes.max_pages

    def of(self, slot: int) -> dict[int, int]:
        """Return the pages of a slot, by their places in its table."""
        first, entries = slot * self.sizes.max_pages, self.entries
        return {i: entries[first + i] for i in range(self.sizes.max_pages) if first + i in entries}

    def cached(self) -> set[int]:
        return {page for entry, page in self.entries.items() if entry >= self.first_place}

    def take(self, slot: int, freed: int, begin: int, end: int) -> None:
        """Give back a slot's pages before `freed`, and assign it those from `begin` to `end`."""
        first = slot * self.sizes.max_pages
        self.assign([-1] * freed, [*range(first, first + freed)])
        free = [page for page, owners in enumerate(self.owners) if not owners]
        for index in range(max(begin, freed), end):
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
    backlog: int = 0  # idle rounds that its draft has yet to catch up with
    notified: int = 0  # tokens of the text that the executor has got, for a constrained request
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
    client: int = 0
    timeout_ns: int = 0
    turn: int = 0  # in the queue, within its priority
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


def submission(prompt: Any, max_new_tokens: Any, stop_tokens: Sequence[Any] = (), **options: Any) -> _C.Submission:
    return _C.Submission(prompt=prompt, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, **options)


class Device:
    """A fake executor. It models the device exactly, and asserts what the scheduler owes it at every call."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.rng = sizes, random.Random(seed)
        made = rings(sizes)
        self.commands, self.results = made["commands"], made["results"]
        self.num_applied = self.num_published = 0
        self.scheduler = _C.Scheduler(self, sizes.config, **made)
        self.num_catch_ups = 0
        if sizes.max_idle_rounds:  # rounds take any time, and so any level may be the best one
            costs = [[float(n) for n in each] for each in sizes.rows], [self.rng.uniform(0.1, 50) for _ in sizes.rows]
            self.scheduler.set_costs(_C.RoundCosts(sizes.batch_sizes, sizes.rows, *costs))
        self.pages = Pages(sizes)
        self.slots: dict[int, Slot] = {}  # in the order of `begin`
        self.snapshots: dict[int, list[int]] = {}  # the texts whose states they are
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
        self.turn = 0  # of a request that comes now
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

    def submit(self, prompt: list[int], max_new_tokens: int, stop_tokens: list[int] = [], client: int = 0) -> int:  # noqa: B006
        number = len(self.sent)
        if number % 2 and not client:
            (request_id,) = self.submit_many([(prompt, max_new_tokens, stop_tokens)])
            return request_id
        wants = self.wants(number, max_new_tokens)
        options = self.sampling(number) | wants | {"streams": self.streams, "ngram_group": number % 5, "client": client}
        turn = self.next_turn()
        if client:
            held = {slot.request_id for slot in self.slots.values()}
            before = [s.turn for i, s in self.sent.items() if s.client == client and not s.reason and i not in held]
            turn = max(turn + 2 * len(before), *before, 0)
        request_id = self.scheduler.submit(submission(prompt, max_new_tokens, stop_tokens, **options))
        self.sent[request_id] = Sent(prompt, max_new_tokens, stop_tokens, **wants, client=client, turn=turn)
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
        turn = self.next_turn()
        ids = self.scheduler.submit_many(every)
        for place, (request_id, request, wanted) in enumerate(zip(ids, requests, wants, strict=True)):
            self.sent[request_id] = Sent(*request, **wanted, turn=turn + 2 * place)
        return ids

    def next_turn(self) -> int:
        """Return how many requests have left the queue so far; those of a call come two turns apart.

        Where another thread drives the loop, calls of one request come in the order of their ids.
        """
        self.turn = 0 if self.driven else max(self.turn, len(self.sent) - self.scheduler.num_waiting)
        return self.turn

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
        """Run a turn, after which the device may differ from the scheduler's view of it."""
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
        assert self.scheduler.num_snapshots == 0, "a snapshot is lost"

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
        """Assign the pages of all rows up to `end`, but for those below the window of the text so far."""
        sizes, rows = self.sizes, len(slot.text) - 1 if slot.started else slot.rows
        freed = max(0, rows - sizes.window) // sizes.page_size if sizes.window else 0
        begin, slot.end_page = slot.end_page, max(slot.end_page, -(-end // sizes.page_size))
        self.pages.take(slot.number, min(freed, slot.end_page), begin, slot.end_page)

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

    def rank(self, request_id: int) -> tuple[int, int, int]:
        sent = self.sent[request_id]
        return sent.priority, sent.turn, request_id

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

    def begin(self, slot: int, request: _C.AdmittedRequest) -> None:
        request_id, text, cached = request.id, request.tokens, request.cached_entries
        sent = self.sent[request_id]
        assert request.extra is sent.extra
        assert request.ngram_group == request_id % 5
        assert slot not in self.slots and 0 <= slot < self.sizes.num_slots
        assert text == sent.prompt + sent.produced, "a retracted request returns with what it produced"
        if self.visible:
            assert request_id == self.waiting()[0], "by priority, then turn, then order of arrival"
        rows, first = len(cached) * self.sizes.page_size, slot * self.sizes.max_pages
        assert not cached or (self.sizes.prefix_cache and rows < len(text)), "the root's row is left to prefill"
        state = self.slots[slot] = Slot(slot, request_id, list(text), rows, drafted=rows, notified=len(text))
        state.end_page = len(cached)
        self.pages.assign(cached, [*range(first, first + len(cached))])
        self.pages.expect_text(slot, text, rows)
        if self.sizes.num_snapshots and cached:
            assert self.snapshots[request.snapshot] == text[:rows], "the state of another text"
        else:
            assert request.snapshot == -1
        assert self.needed(1) <= self.sizes.num_pages
        self.take_pages(state, 0 if self.sizes.window else len(text) - 1 + self.sizes.reserve)
        if request_id not in self.first_starts:
            self.first_starts.append(request_id)
        self.may_fail("begin", request_id)

    def prefill(self, chunks: list[_C.PrefillChunk]) -> None:
        states = [self.slots[chunk.slot] for chunk in chunks]
        # The first in rank that are not prefilled, as many rows of each as there is room for.
        wanting = self.by_rank([s for s in self.slots.values() if not (s.left or s.active) and s.rows < len(s.text)])
        assert states == wanting[: len(chunks)] and len(chunks) <= self.sizes.prefill_requests
        room = self.sizes.prefill_chunk
        for state, chunk in zip(states, chunks, strict=True):
            count = min(room, len(state.text) - state.rows)
            if self.sizes.num_snapshots and len(chunk.tokens) - 1 < count:
                count = len(chunk.tokens) - 1
                assert (chunk.start + count) % self.sizes.page_size == 0, "it ends where a snapshot may be saved"
            assert not state.active and chunk.start == state.rows and count > 0
            assert chunk.tokens == [*state.text, state.text[-1]][chunk.start : chunk.start + count + 1]
            room -= count
            self.take_pages(state, chunk.start + count)
        assert not room or len(chunks) in (len(wanting), self.sizes.prefill_requests)
        self.may_fail("prefill", *(state.request_id for state in states))
        for state, chunk in zip(states, chunks, strict=True):
            state.rows += len(chunk.tokens) - 1
            self.pages.write_text(chunk.slot, state.text, chunk.start, state.rows)
            state.drafted = min(state.rows, len(state.text) - 1)
            self.take_pages(state, state.rows)
        for other in self.slots.values():
            other.chunks_waited += other.takes_part
            late = self.stall and self.sizes.rounds_in_flight > 1  # that somebody stalled is seen when it is read
            assert other.chunks_waited <= 1 or self.sizes.max_batch < self.sizes.num_slots or self.faults or late

    def save_snapshots(self, slots: list[int], snapshots: list[int]) -> None:
        assert len({*slots}) == len(slots) == len({*snapshots}) == len(snapshots) > 0
        self.may_fail("save_snapshots", *(self.slots[slot].request_id for slot in slots))
        for slot, snapshot in zip(slots, snapshots, strict=True):
            state = self.slots[slot]
            assert 0 <= snapshot < self.sizes.num_snapshots and not state.active and not state.left
            assert 0 < state.rows < len(state.text) and state.rows % self.sizes.page_size == 0
            self.snapshots[snapshot] = state.text[: state.rows]

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
        """Apply the next record of commands, and return the slots of the round."""
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

    def constrain(self, number: int, requests: list[_C.ConstrainedRow], batch: int, num_rows: int) -> None:
        assert number == self.num_applied and batch >= len(self.drafted)
        states = [self.slots[slot] for slot in self.drafted]
        going_on = [state for state in states if not state.finished and not state.left]
        constrained = [state for state in going_on if self.sent[state.request_id].constrained]
        assert [self.slots[request.slot] for request in requests] == constrained, "rounds before have been read"
        for request in requests:
            state = self.slots[request.slot]
            assert self.drafted[request.row] == request.slot and request.tokens == state.text[state.notified :]
            state.notified = len(state.text)
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
        """Check that drafting slots have no backlog, and that no backlog exceeds its limit."""
        sizes, states = self.sizes, [self.slots[slot] for slot in slots]
        drafting = [s for s in states if self.sent[s.request_id].max_nodes != 1]
        if num_rows == CATCH_UP:
            assert sizes.max_idle_rounds and (self.faults or any(state.backlog for state in states))
            self.num_catch_ups += 1
            for state in states:
                state.backlog = 0
                if state in drafting:
                    self.pages.write_text(state.number, state.text, state.drafted, state.rows)
                    state.drafted = state.rows
            return
        budget_levels = sizes.rows[sizes.batch_sizes.index(batch)]
        assert num_rows in budget_levels if drafting or not sizes.plain_rounds else num_rows == batch
        if num_rows > batch:
            assert not any(state.backlog for state in states)
        elif sizes.max_idle_rounds:
            for state in drafting:
                state.backlog += 1
                assert state.backlog <= sizes.max_idle_rounds

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
        if count and not was_finished:  # a tree; its accepted path is compacted, except at the end
            for extra in range(0 if is_first else self.sizes.reserve):
                self.pages.write(state.number, state.rows + extra, 0)
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

    def emit(self, updates: list[_C.RequestUpdate]) -> None:
        if updates:
            self.events.append("emit")
        for update in updates:
            sent, tokens = self.sent[update.request_id], update.tokens
            assert update.scores == (None if sent.num_logprobs < 0 else scores_of(tokens, sent.num_logprobs))
            assert not sent.reason, "nothing follows the last update"
            assert update.reason or (tokens and self.streams)
            assert (update.error is not None) == (update.reason == ERROR and not update.status)
            assert update.cached < len(sent.prompt)
            sent.emitted += tokens
            sent.reason, sent.status, sent.error = update.reason, update.status, update.error
            sent.counts = (update.rounds, update.drafted, update.accepted)
            assert sent.emitted == sent.produced[: len(sent.emitted)]
            if sent.reason:
                assert update.request_id not in {s.request_id for s in self.slots.values() if not s.left}
        for sent in (self.sent[update.request_id] for update in updates):
            up_to_date = self.sizes.rounds_in_flight == 1 and not self.driven
            if sent.reason not in (ERROR, CANCELLED, TIMEOUT) and (sent.reason or (up_to_date and not sent.failed)):
                assert sent.emitted == sent.produced and sent.counts == (sent.rounds, sent.drafted, sent.accepted)


def any_device(seed: int, rounds_in_flight: int = 1, snapshots: bool = False) -> Device:
    device = Device(Sizes.random(random.Random(seed), rounds_in_flight, snapshots), seed)
    device.streams = device.rng.random() < 0.7
    device.priorities = device.rng.choice([[0], [0], [1, 0], [2, -7, 0, 0, 2]])
    return device


METHODS = ["begin", "prefill", "record", "activate", "first round", "round", "constrain", "deactivate", "assign_pages"]
