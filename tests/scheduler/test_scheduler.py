"""The scheduler against a model of the device that knows every page, slot and token."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import _C
from support.exhaustive import covering, exhaustive
from support.fake_device import (
    BAD_LENGTH,
    BAD_TREE,
    CANCELLED,
    CONTEXT,
    DEPTH,
    ERROR,
    LENGTH,
    METHODS,
    STALLED,
    STOP,
    TIMEOUT,
    Device,
    Fault,
    Sent,
    Sizes,
    any_device,
    rings,
    submission,
    token,
)

# --- random mixes

MIXES = 125  # seeds of a batch
# Counts of the first batch, whose seeds are fixed, for one, two and three rounds in flight.
RETRACTIONS = (34, 32, 24)
FAULTS = {
    "activate": (45, 40, 41),
    "assign_pages": (18, 19, 16),
    "begin": (42, 40, 41),
    "constrain": (24, 25, 21),
    "deactivate": (31, 37, 35),
    "first round": (29, 34, 33),
    "prefill": (53, 57, 54),
    "record": (65, 67, 68),
    "round": (61, 56, 64),
}
overlapped = pytest.mark.parametrize("rounds_in_flight", [1, 2, 3])


@overlapped
@pytest.mark.parametrize("batch", [0, *exhaustive(*range(1, 16))])
def test_scheduler_random_mixes(batch: int, rounds_in_flight: int) -> None:
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
    assert retractions == RETRACTIONS[rounds_in_flight - 1] if batch == 0 else retractions > 15


@overlapped
@pytest.mark.parametrize("batch", [0, *exhaustive(*range(1, 8))])
def test_scheduler_random_cancels(batch: int, rounds_in_flight: int) -> None:
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


@pytest.mark.parametrize(("method", "rounds_in_flight"), covering(METHODS, [1, 2, 3]))
@pytest.mark.parametrize("batch", [0, *exhaustive(*range(1, 6))])
def test_scheduler_random_exceptions(batch: int, method: str, rounds_in_flight: int) -> None:
    """Whatever raises, the exception comes out, its requests end with an error, and the others lose nothing."""
    faults = 0
    for seed in range(batch * 50, (batch + 1) * 50):
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
    assert faults == FAULTS[method][rounds_in_flight - 1] if batch == 0 else faults > 5


@pytest.mark.parametrize("method", [None, "save_snapshots", *exhaustive("prefill", "begin", "assign_pages", "round")])
def test_scheduler_random_mixes_with_snapshots(method: str | None) -> None:
    """A request begins with the state of its cached pages, whatever is evicted, cancelled or fails; none gets lost."""
    restored = evicted = faults = 0

    def step(device: Device) -> bool:
        nonlocal faults
        try:
            return device.step()
        except Fault:
            faults += 1
            return True

    for seed in range(45):
        device = any_device(seed, 1 + seed % 3, snapshots=True)
        device.stall = device.rng.choice([0, 0, 0.3])
        device.faults = {} if method is None else {method: 0.15}
        for _ in range(device.rng.randint(2, 14)):
            device.submit_any()
            if device.rng.random() < 0.15:
                device.cancel(device.rng.randrange(len(device.sent)))
            for _ in range(device.rng.choice([0, 1, 9, 30])):
                step(device)
        while step(device):
            pass
        device.faults = {}
        device.run()
        restored += device.scheduler.num_restored_snapshots
        evicted += device.scheduler.num_evicted_snapshots
    assert restored > 10 and evicted > 10 and (faults > 5) == (method is not None)


@settings(max_examples=150)
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
def test_scheduler_hypothesis_plans(sizes: Sizes, plan: list[tuple[str, int, int]]) -> None:
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
    """Priority orders the queue only: a running request keeps its slot."""
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


def test_queue_head_without_room_blocks_lower_priorities() -> None:
    """A long prompt of a high priority is not passed by short ones of a lower one for which there would be room."""
    device = Device(Sizes(num_slots=3, num_pages=9, max_len=24))
    device.priorities = [0, 1, 0]
    device.submit([1] * 10, 8)
    device.step()
    device.submit([1], 1)
    device.submit([1] * 20, 1)
    device.run()
    assert device.first_starts == [0, 2, 1]


def test_scheduler_retracts_lowest_priority() -> None:
    """The newest of the lowest priority is retracted; it resumes before others of its priority, after higher ones."""
    sizes = Sizes(num_slots=2, num_pages=8, page_size=4, max_len=24, reserve=6, accept_width=4, batch_sizes=(1, 2))
    device = Device(sizes)
    device.priorities = [1, 0, 1, 0]
    low, high = device.submit([1, 2], 20), device.submit([3], 20)
    device.step()
    later, late = device.submit([4], 1), device.submit([5], 1)
    starts: list[int] = []
    begin = device.begin
    device.begin = lambda slot, request: (starts.append(request.id), begin(slot, request))[1]  # type: ignore[method-assign]
    device.run()
    assert device.retracted and set(device.retracted) == {low}
    assert device.first_starts == [high, low, late, later] and starts.index(low) < starts.index(later)
    assert len(device.sent[low].emitted) == len(device.sent[high].emitted) == 20


def test_scheduler_prefills_higher_priority_first() -> None:
    device = Device(Sizes(prefill_chunk=4, num_slots=2, batch_sizes=(1, 2)))
    device.priorities = [1, 0]
    calls: list[list[int]] = []
    prefill = device.prefill
    device.prefill = lambda chunks: (calls.append([chunk.slot for chunk in chunks]), prefill(chunks))[1]  # type: ignore[method-assign]
    device.submit([1] * 12, 2)
    device.step()
    device.submit([1] * 8, 2)
    device.run()
    assert calls == [[0], [1], [1], [0], [0]]


def test_scheduler_timed_out_request_never_starts() -> None:
    device = Device(Sizes(num_slots=1, batch_sizes=(1,)))
    device.timeouts = [0, 1, 3600 * 10**9]
    for _ in range(3):
        device.submit([1, 2], 5)
    device.run()
    assert device.first_starts == [0, 2]
    assert [sent.reason for sent in device.sent.values()] == [LENGTH, TIMEOUT, LENGTH]


@pytest.mark.parametrize("rounds_in_flight", [*exhaustive(1), 2])
def test_scheduler_request_ends_at_timeout(rounds_in_flight: int) -> None:
    """A request may be cancelled while it runs, waits or is retracted; it keeps its tokens, and others are unaffected."""
    sizes = Sizes(num_slots=2, num_pages=300, max_len=1000, accept_width=1, rounds_in_flight=rounds_in_flight)
    device = Device(Sizes(**{**sizes.fields, "batch_sizes": (1, 2), "rows": [[4], [8]]}))
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
    """Pages below the window are free: all requests run, and one is retracted only if the windows do not fit together."""
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

    def note(chunks: list[_C.PrefillChunk]) -> None:
        calls.append([(chunk.slot, chunk.start, len(chunk.tokens) - 1) for chunk in chunks])
        prefill(chunks)

    device.prefill = note  # type: ignore[method-assign]
    device.step()
    device.step()
    assert calls == [[(0, 0, 3), (1, 0, 4)], [(1, 4, 3), (2, 0, 2)]]
    assert device.events == [
        *["begin", "begin", "begin", "prefill", "record", "activate", "first round", "round", "emit"],
        *["prefill", "record", "activate", "first round", "round", "emit"],
    ]


def test_round_after_prefill_sees_earlier_rounds() -> None:
    """They are read while the device is at the pass."""
    device = Device(Sizes(rounds_in_flight=2, accept_width=1, batch_sizes=(1, 2, 3)))
    device.submit([1] * 4, 9, [token(0, 6)])  # ends with the second round after its first one
    rows: list[list[int]] = []
    check_rows = device.check_rows
    device.check_rows = lambda slots, batch: (rows.append(slots), check_rows(slots, batch))  # type: ignore[method-assign]
    device.step()
    device.step()
    device.submit([1] * 4, 2)
    device.step()
    assert rows == [[0], [0], [1]]
    device.run()


def test_client_that_always_has_requests_waiting_keeps_half_of_the_slots() -> None:
    """However many of its requests ran before those of another client came."""
    device = Device(Sizes(num_slots=1, batch_sizes=(1,)))
    begun: list[int] = []
    begin = device.begin
    device.begin = lambda slot, request: (begun.append(request.id), begin(slot, request))[1]  # type: ignore[method-assign]

    def serve(until: int) -> None:
        """Let the first client always have three requests that wait."""
        while len(begun) < until:
            while device.scheduler.num_waiting < 3:
                device.submit([1], 1, client=1)
            device.step()

    serve(100)
    for _ in range(40):
        device.submit([1], 1, client=2)
    served = len(begun)
    for _ in range(20):
        device.submit([1], 1, client=1)
    while len(begun) < served + 40:
        device.step()
    assert 18 <= sum(device.sent[one].client == 1 for one in begun[served : served + 40]) <= 22


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


def test_stalled_first_round_is_not_repeated() -> None:
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


def test_round_without_progress_ends_newest_request() -> None:
    """Pages that were counted and are not there: the loop gives way instead of spinning."""
    device = Device(Sizes())
    first, second = device.submit([1], 9), device.submit([2], 9)
    device.sent[second].failed = True
    play = device.play
    device.play = lambda row, state, count, *kind: play(row, state, count if device.sent[second].reason else 0, *kind)  # type: ignore[method-assign]
    device.run()
    assert (device.sent[second].reason, device.sent[second].status) == (ERROR, STALLED)
    assert device.sent[first].reason == LENGTH


def test_scheduler_stop() -> None:
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
        device.scheduler.submit(submission([1], 1))
    device.scheduler.run()  # which returns at once, for good
    with pytest.raises(RuntimeError, match=r"^pause: the scheduler has been stopped, expected one that runs$"):
        device.scheduler.pause()
    with pytest.raises(RuntimeError, match=r"^submit_many: the scheduler has been stopped, expected one that runs$"):
        device.scheduler.submit_many([submission([1], 1)] * 2)
    device.scheduler.run()
    assert device.scheduler.take() is None


def test_scheduler_idle_and_unknown_ids() -> None:
    device = Device(Sizes())
    assert not device.step()
    assert not device.scheduler.cancel(0) and device.scheduler.take(wait=False) == []
    device.submit([1], 1)
    device.run()
    assert not device.scheduler.cancel(0) and device.scheduler.take(wait=False) == []


@pytest.mark.parametrize("fault", ["progress", "record"])
def test_scheduler_device_failure(fault: str) -> None:
    """If progress is unknown or no launch succeeds, all requests end with the error, later ones too."""
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
    request_id = device.scheduler.submit(submission(*arguments, **device.sampling(0)))
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

    def begin(slot: int, request: _C.AdmittedRequest) -> None:
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
        while (updates := device.scheduler.take()) is not None:
            device.emit(updates)

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


def test_submit_many_joins_in_one_round() -> None:
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
    """An error is delivered once: to its requests, or to the caller if it has none."""
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
            updates = device.scheduler.take()
            assert updates
            device.emit(updates)
        device.faults = {}
        reasons.append((device.sent[request_id].reason, str(device.sent[request_id].error)))
    device.scheduler.stop()
    thread.join(10)
    assert ended.is_set() and device.scheduler.take() is None
    assert reasons == [(LENGTH, "None"), (ERROR, "prefill"), *3 * [(LENGTH, "None")]]
    assert raised == ["deactivate"]


def test_second_scheduler_loop_is_refused() -> None:
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


def test_unreferenced_scheduler_is_collected() -> None:
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
    ],
)
def test_submit_refuses_values_by_name(arguments: Any, message: str) -> None:
    device = Device(Sizes())
    *arguments, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    good, bad = submission([1], 1), submission(*arguments, **options)
    with pytest.raises(ValueError) as error:
        device.scheduler.submit(bad)
    assert str(error.value) == message
    with pytest.raises(ValueError) as error:  # submits none of them, and names the first that is refused
        device.scheduler.submit_many([good, bad, good, bad])
    assert str(error.value) == message.replace("submit: ", "submit_many: requests[1]: ")
    assert device.scheduler.num_waiting == 0 and device.submit_any() == 0


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"prompt": ["a"]}, TypeError, "Submission: prompt holds other things, expected ints"),
        ({"stop_tokens": ["a"]}, TypeError, "Submission: stop_tokens holds other things, expected ints"),
        ({"prompt": "text"}, TypeError, "Submission: prompt is a str, expected a tensor"),
        ({"prompt": np.zeros((2, 2), np.int32)}, ValueError, "Submission: prompt has shape [2, 2], expected [length]"),
        ({"prompt": np.zeros(2, np.int64)}, ValueError, "Submission: prompt is int64, expected int32"),
        ({"max_new_tokens": "1"}, TypeError, "__init__(): incompatible constructor arguments"),
        ({"max_new_tokens": 2**63}, TypeError, "__init__(): incompatible constructor arguments"),
        ({"temprature": 1.0}, TypeError, "__init__(): incompatible constructor arguments"),
    ],
)
def test_submission_refuses_wrong_types(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        _C.Submission(**{"prompt": [1], "max_new_tokens": 1} | fields)
    assert str(error.value).startswith(message)


def test_submit_many_takes_submissions_alone() -> None:
    device = Device(Sizes())
    for bad in (1, "twelve chars", ([1], 1), None):
        with pytest.raises(TypeError):
            device.scheduler.submit_many([submission([1], 1), bad])
    assert device.scheduler.num_waiting == 0


def test_submission_has_fields_and_defaults_of_its_struct() -> None:
    made = submission([1], 7, top_p=0.5, migrated=True)
    assert (made.max_new_tokens, made.top_p, made.migrated) == (7, 0.5, True)
    assert (made.temperature, made.num_logprobs, made.streams, made.timeout_ns) == (0.0, -1, True, 0)


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
        given = rings(Sizes()) | {name: change[name] for name in ("commands", "results", "graphs") if name in change}
        sizes = {name: value for name, value in change.items() if name not in given}
        _C.Scheduler(None, _C.SchedulerConfig(**Sizes().fields | sizes), **given)
    assert str(error.value) == message


def test_the_largest_budgets() -> None:
    device, most = Device(Sizes()), 2**63 - 1
    request = device.scheduler.submit(submission([1, 2], most, **device.sampling(0), min_new_tokens=most))
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
    times = device.scheduler.times
    assert (times.device, times.following, times.gaps) == (5 * 900, 4 * 900, 4 * 100), (
        "the first one is no measure of others"
    )


@overlapped
def test_scheduler_streaming(rounds_in_flight: int) -> None:
    """A request that does not stream has one update, at its end."""
    device = Device(Sizes(rounds_in_flight=rounds_in_flight))
    device.streams = False
    quiet = device.submit([1], 9)
    device.run()
    assert device.events.count("emit") == 1 and len(device.sent[quiet].emitted) == 9


@pytest.mark.parametrize(("rounds_in_flight", "late"), [(1, 0), (2, 1), (3, 2)])
def test_scheduler_late_results(rounds_in_flight: int, late: int) -> None:
    device = Device(Sizes(rounds_in_flight=rounds_in_flight, accept_width=1, reserve=6))
    device.submit([1], 9)
    for turn in range(1, 9):  # the first turn has the first round, too
        device.step()
        assert device.num_published == min(turn + 1, 9)
        assert len(device.sent[0].emitted) == max(turn + 1 - late, 0)
    device.run()
    assert device.num_published == 9, "nobody launches a round for a request whose budget is spent in flight"


def test_scheduler_times_and_trace(tmp_path: Path) -> None:
    device = Device(Sizes(rounds_in_flight=2))
    device.submit([1, 2, 3], 9)
    device.run()
    times = device.scheduler.times
    assert times.rounds == times.rows == device.num_published - 1 > 0
    assert min(times.host, times.prefill) > 0 and times.wait == 0
    device.scheduler.write_trace(str(tmp_path / "none.json"))  # it was not to be kept
    traced = _C.Scheduler(None, Sizes().config, **rings(Sizes()), trace=True)
    traced.step()
    traced.write_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["admit", "plan", "turn"]
    assert not [e for e in json.loads((tmp_path / "none.json").read_text())["traceEvents"] if e["ph"] == "X"]
