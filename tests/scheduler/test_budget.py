"""The budget: what rounds cost is measured, what drafts bring is learnt, and no level changes a text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec_kernels import _C
from specdec_kernels.engine import DraftBudget, Eagle3, Ngram, Union
from specdec_kernels.engine.config import budget_levels
from specdec_kernels.engine.device.graphs import Graphs
from specdec_kernels.engine.device.round import Drafted
from specdec_kernels.engine.drafts.model import ModelDraft
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from support.budget_engines import (
    DRAFTS,
    HEAD,
    every_draft,
    expect_plain_texts,
    make_engine,
    prompts,
)
from support.devices import HAS_CUDA
from support.exhaustive import exhaustive
from support.observed_rounds import wrap_launch

NODES = [1, 2, 4, 8, 16]
WIDTH, DEPTH = 16, 5


class Device:
    """Rounds of a chain: node i is accepted, if those before it are, with probability `rate`."""

    def __init__(
        self, cost: Callable[[int, int], float], rate: float, batch: int = 1, max_idle_rounds: int = 0
    ) -> None:
        self.cost, self.rate, self.rng = cost, rate, random.Random(5)
        self.commands = np.full((DEPTH, _C.command_words(batch, batch, 0)), -1, np.int32)
        self.results = np.zeros((DEPTH, _C.result_words(batch, WIDTH, len(NODES), -1)), np.int32)
        self.num_applied = self.num_published = 0
        self.rounds: list[int] = []  # the nodes of each
        self.us = self.tokens = 0.0
        self.catch_up, self.now = (lambda _batch: 0.0), 0.0  # us
        self.lengths, self.wrong_each = [0] * batch, 0  # 0: by chance
        sizes = _C.SchedulerConfig(
            num_slots=batch,
            num_pages=10**6,
            page_size=16,
            max_len=10**6,
            reserve=WIDTH + 1,
            accept_width=WIDTH,
            max_stops=0,
            prefill_chunk=batch,
            prefill_requests=batch,
            rounds_in_flight=2,
            batch_sizes=[*range(1, batch + 1)],
            rows=[[size * nodes for nodes in NODES] for size in range(1, batch + 1)],
            max_idle_rounds=max_idle_rounds,
        )
        self.scheduler = _C.Scheduler(self, sizes, commands=self.commands, results=self.results)
        for _ in range(batch):
            self.scheduler.submit(_C.Submission(prompt=[1], max_new_tokens=10**5, streams=False))

    def launch(self, batch: int, num_rows: int, _max_kv_len: int) -> None:
        record = self.commands[self.num_applied % DEPTH]
        self.num_applied += 1
        record[0] = self.num_applied
        if batch == 0:
            return
        is_first, num_nodes = num_rows == _C.FIRST_ROUND, max(num_rows // batch, num_rows == _C.FIRST_ROUND)
        result = self.results[self.num_published % DEPTH]
        us = self.cost(batch, num_nodes) if num_nodes else self.catch_up(batch)
        began, self.now = self.now, self.now + us
        if num_nodes == 0:
            self.us += us
            return
        result[2:6].view(np.int64)[:] = [int(1000 * began), int(1000 * self.now)]
        rows = int((record[2 : 2 + batch] >= 0).sum())
        drafts = np.zeros(len(NODES), np.int32)
        for b, row in enumerate(result[8 + 2 * len(NODES) :][: batch * (4 + WIDTH)].reshape(-1, 4 + WIDTH)[:rows]):
            accepted = 0
            while accepted + 1 < num_nodes and self.is_right(b, accepted):
                accepted += 1
            self.lengths[b] += accepted + 1
            row[:4] = accepted + 1, 0, 0, num_nodes
            row[4 : 4 + WIDTH] = 7
            drafts += np.minimum(accepted, np.array(NODES) - 1).astype(np.int32)
            self.tokens += accepted + 1
        result[6] = rows
        result[8:][: len(NODES)] = drafts.astype(np.float32).view(np.int32)
        result[8 + len(NODES) :][: len(NODES)] = drafts
        if rows and not is_first:
            self.rounds.append(num_nodes)
            self.us += us
        self.num_published += 1
        result[0] = self.num_published

    def measure(self, *sizes: int) -> None:
        """Time these sizes, or every one; forget what happens meanwhile."""
        before = self.lengths[:], self.rng.getstate()
        self.scheduler.measure_rounds([*sizes] or [*range(1, len(self.lengths) + 1)])
        self.measured, self.rounds = self.rounds, []
        self.us = self.tokens = 0.0
        self.lengths[:] = before[0]
        self.rng.setstate(before[1])

    def is_right(self, b: int, ahead: int) -> bool:
        """Return whether the draft that follows this many accepted ones is accepted."""
        if self.wrong_each:
            return (self.lengths[b] + ahead + 1) % self.wrong_each > 0
        return self.rng.random() < self.rate

    def run(self, rounds: int) -> list[int]:
        """Return the nodes of `count` more rounds."""
        before = len(self.rounds)
        while len(self.rounds) < before + rounds:
            self.scheduler.step()
        return self.rounds[before:]

    def nothing(self, *_arguments: Any) -> None:
        pass

    begin = prefill = activate = deactivate = nothing


def flat(_batch: int, num_nodes: int) -> float:
    return 5000 + 20 * num_nodes


def bound(batch: int, num_nodes: int) -> float:
    """Where the weights are read once, and from some rows on every row costs."""
    return max(5000 + 10 * batch * num_nodes, 110 * batch * num_nodes)


def best_nodes(device: Device, batch: int) -> int:
    def rate(nodes: int) -> float:
        return sum(device.rate**i for i in range(nodes)) / device.cost(batch, nodes)

    return max(NODES, key=rate)


def test_every_size_is_measured_and_counts_as_no_round() -> None:
    device = Device(lambda batch, nodes: 100 * batch + nodes, 0.5, batch=3)
    assert device.scheduler.costs is None
    device.measure()
    costs = device.scheduler.costs
    assert costs is not None and costs.batches == [1, 2, 3]
    assert costs.rows == [[batch * nodes for nodes in NODES] for batch in (1, 2, 3)]
    assert costs.us == [[100 * batch + nodes for nodes in NODES] for batch in (1, 2, 3)]
    assert set(device.measured) == {*NODES}  # rounds of dummy requests, which leave no state
    assert device.scheduler.times == (0,) * 8 and device.scheduler.rounds_by_rows == [[0] * len(NODES)] * 3
    again = Device(lambda batch, nodes: 1.0, 0.5, batch=3)
    again.scheduler.set_costs(costs)
    assert again.scheduler.costs is not None and again.scheduler.costs.us == costs.us
    with pytest.raises(ValueError) as error:
        Device(flat, 0.5, batch=2).scheduler.set_costs(costs)
    assert str(error.value) == (
        f"set_costs: costs is of other rounds, expected batches [1, 2] with rows up to {[2 * nodes for nodes in NODES]}"
    )
    device.run(40)
    counts = [sum(n == nodes for n in device.rounds[:-1]) for nodes in NODES]
    assert [sum(each) for each in zip(*device.scheduler.rounds_by_rows, strict=True)] == counts
    with pytest.raises(RuntimeError, match="measure_rounds: requests hold slots, expected none"):
        device.measure()
    with pytest.raises(RuntimeError, match="set_costs: requests hold slots, expected none"):
        device.scheduler.set_costs(costs)


def test_catching_up_is_measured_between_rounds() -> None:
    device = Device(lambda batch, nodes: 100 * batch + nodes, 0.5, batch=3, max_idle_rounds=8)
    device.catch_up = lambda batch: 7.0 * batch
    device.measure(1, 3)
    costs = device.scheduler.costs
    assert costs is not None and costs.catch_up == pytest.approx([7, 14, 21])
    assert costs.us == [[100 * batch + nodes for nodes in NODES] for batch in (1, 2, 3)]
    with pytest.raises(ValueError) as error:
        Device(flat, 0.5, batch=3).scheduler.set_costs(costs)
    assert (
        str(error.value)
        == "set_costs: costs is with catch_up, expected it if a draft can be idle (max_idle_rounds is 0)"
    )
    without = _C.RoundCosts(costs.batches, costs.rows, costs.us)
    with pytest.raises(ValueError) as error:
        Device(flat, 0.5, batch=3, max_idle_rounds=8).scheduler.set_costs(without)
    assert (
        str(error.value)
        == "set_costs: costs is without catch_up, expected it if a draft can be idle (max_idle_rounds is 8)"
    )


@pytest.mark.parametrize("catch_up", [20.0, 500.0, 4000.0])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("batch", [1, 16, *exhaustive(64)])
def test_budget_idles_where_best(catch_up: float, rate: float, batch: int) -> None:
    """What catching up takes is part of what it is measured by; it is never far below a device that only rests."""
    device = Device(bound, rate, batch, max_idle_rounds=16)
    device.catch_up = lambda _batch: catch_up
    device.measure()
    device.run(200)
    device.us = device.tokens = 0
    device.run(1500)
    plain = batch / (bound(batch, 1) + catch_up / 16)
    best = max(batch * sum(rate**i for i in range(n)) / bound(batch, n) for n in NODES[1:])
    assert device.tokens / device.us > max(0.985 * plain, 0.94 * best)


def test_sizes_between_those_that_are_measured() -> None:
    device = Device(lambda batch, nodes: 100 * batch * batch + nodes, 0.5, batch=7)
    device.measure(1, 3, 7)
    costs = device.scheduler.costs
    squares = [1, 5, 9, 19, 29, 39, 49]
    assert costs is not None and costs.batches == [1, 2, 3, 4, 5, 6, 7]
    for row, square in zip(costs.us, squares, strict=True):
        assert row == pytest.approx([100 * square + nodes for nodes in NODES])
    assert device.scheduler.times == (0,) * 8


@pytest.mark.parametrize("batches", [[], [1], [2, 3], [1, 2], [1, 4], [1, 3, 3], [3, 1]])
def test_what_is_measured_must_be_sizes_of_rounds(batches: list[int]) -> None:
    with pytest.raises(ValueError) as error:
        Device(flat, 0.5, batch=3).scheduler.measure_rounds(batches)
    assert str(error.value) == (
        f"measure_rounds: batches is {batches}, expected increasing ones of [1, 2, 3], the first and the last among them"
    )


def test_rounds_that_take_long_are_timed_once() -> None:
    for us, times in ((9_999, 2), (10_000, 1)):
        device = Device(lambda _batch, _nodes, us=us: us, 0.5)  # type: ignore[misc]
        device.measure()
        assert device.num_published == times * len(NODES)


def test_budget_delayed_round_is_timed_again() -> None:
    late = {(2, 4): 50_000.0, (2, 8): 60_000.0, (1, 1): 20_000.0}
    device = Device(lambda batch, nodes: late.pop((batch, nodes), 100 * batch + nodes), 0.5, batch=2)
    device.measure()
    assert not late and device.scheduler.costs is not None
    assert device.scheduler.costs.us == [[100 * batch + nodes for nodes in NODES] for batch in (1, 2)]


def test_budget_outliers_of_a_busy_machine_are_forgotten() -> None:
    """Rounds are delayed twice at several levels, the largest among them."""
    late = {1: [35_000.0] * 2, 2: [490_000.0] * 2, 16: [300_000.0] * 2}
    device = Device(lambda _, nodes: late[nodes].pop() if late.get(nodes) else 1600 + nodes, 0.5)
    device.measure()
    assert device.scheduler.costs is not None
    assert device.scheduler.costs.us == [[1600 + nodes for nodes in NODES]]


def test_budget_costs_that_stay_odd_are_kept() -> None:
    """A kernel of few rows may be slower: its time is taken some times again."""
    odd = {1: 3000.0, 2: 2000.0, 4: 2100.0, 8: 2200.0, 16: 9000.0}
    device = Device(lambda _, nodes: odd[nodes], 0.5)
    device.measure()
    assert device.scheduler.costs is not None and device.scheduler.costs.us == [[*odd.values()]]


def test_budget_without_costs_uses_highest_level() -> None:
    assert set(Device(flat, 0.0).run(100)) == {NODES[-1]}


@pytest.mark.parametrize("cost", [flat, bound])
@pytest.mark.parametrize("rate", [0.0, *exhaustive(0.3), 0.6, 0.95])
@pytest.mark.parametrize("batch", [1, 8, *exhaustive(40, 64)])
def test_budget_finds_best_level(cost: Callable[[int, int], float], rate: float, batch: int) -> None:
    device = Device(cost, rate, batch)
    device.measure()
    device.run(200)
    device.us = device.tokens = 0
    rounds = device.run(1000)
    best = best_nodes(device, batch)
    ideal = batch * sum(rate**i for i in range(best)) / cost(batch, best)
    plain = batch / cost(batch, 1)
    print(f"{best}: { ({n: rounds.count(n) for n in NODES}) }, {device.tokens / device.us / ideal:.3f} of the best")
    assert device.tokens / device.us > 0.94 * ideal  # estimates waver where two levels are nearly as good
    assert device.tokens / device.us > 0.99 * plain


def test_budget_of_rejected_drafts_costs_little() -> None:
    device = Device(bound, 0.0, 64)
    device.measure()
    device.run(50)
    device.us = 0
    rounds = device.run(2000)
    tried = [i for i, nodes in enumerate(rounds) if nodes > 1]
    assert {rounds[i] for i in tried} == {2}  # the next level is twice as dear already
    assert 10 <= len(tried) <= 2000 / 64 and all(b == a + 1 or b - a >= 64 for a, b in pairwise(tried))
    assert device.us < 1.02 * 2000 * bound(64, 1)


def test_cheap_levels_are_all_tried_at_once() -> None:
    device = Device(flat, 0.0)
    device.measure()
    rounds = device.run(2000)[500:]
    assert set(rounds) == {1, NODES[-1]} and rounds.count(NODES[-1]) <= 1500 / 64 + 2


@pytest.mark.parametrize(("cost", "batch"), [(flat, 1), (bound, 8), (bound, 40)])
def test_budget_climbs_again(cost: Callable[[int, int], float], batch: int) -> None:
    device = Device(cost, 0.0, batch)
    device.measure()
    device.run(300)
    assert device.run(500).count(1) > 480
    device.rate = 0.95
    device.run(3000 if batch == 1 else 1200)
    rounds = device.run(100)
    assert rounds.count(best_nodes(device, batch)) > 80, rounds
    device.rate = 0.0
    device.run(300 if batch == 1 else 60)
    assert device.run(200).count(1) > 190


def test_larger_trees_are_not_judged_from_where_small_ones_end() -> None:
    """Check a text in which every fourth draft is wrong, with requests that come together.

    In rounds of two nodes most would begin within such a chunk, where larger trees look worse than they are.
    """
    us = {1: 5400, 2: 5500, 4: 8600, 8: 14500, 16: 24000}
    device = Device(lambda _batch, nodes: us[nodes], 0.0, 64)
    device.wrong_each = 4
    device.measure()
    assert device.run(300).count(4) > 270
    device.wrong_each = 1
    device.run(300)
    assert device.run(100).count(1) > 90
    device.wrong_each = 4
    device.run(600)
    assert device.run(100).count(4) > 80


def test_prefixes_cost_all_levels_the_same() -> None:
    """Which the measured costs do not show: where the round takes long anyway, drafts are worth more."""
    device = Device(bound, 0.6, 24)
    device.measure()
    device.run(100)
    assert device.run(100).count(2) > 90
    device.cost = lambda batch, nodes: bound(batch, nodes) + 20_000
    assert best_nodes(device, 24) == 4
    device.run(400)
    assert device.run(200).count(4) > 180
    device.cost = bound
    device.run(200)
    assert device.run(200).count(2) > 180


# --- texts


@every_draft
def test_budget_levels_keep_texts(name: str, device: torch.device, tmp_path: Path) -> None:
    """Whatever a round's number of nodes, in a pool from which requests are retracted."""
    engine = make_engine(DRAFTS[name](tmp_path), device, cuda_graph=False, num_pages=60)
    rng, most_nodes = random.Random(3), engine.config.needs.num_nodes

    def launch_any(launch: Callable[..., None], batch: int, rows: int, max_kv_len: int) -> None:
        levels = budget_levels(batch, most_nodes, equal=engine.draft.sampled) if rows > 0 else (rows,)
        launch(batch, rng.choice(levels), max_kv_len)

    wrap_launch(engine, launch_any)
    expect_plain_texts(engine)
    # The rows of eagle3+ngram are many, and so are those of two rounds in flight: who is admitted stays.
    assert engine.stats().retractions > 0 or name == "eagle3+ngram" or device.type == "cuda"


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@every_draft
def test_graphs_of_any_level_give_the_same_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the budget picks them, and with the graphs of each batch size exchanged among its levels."""
    device = torch.device("cuda")
    engine = make_engine(DRAFTS[name](tmp_path), device)
    levels = dict(zip(engine.config.batch_sizes, engine.config.rows, strict=True))
    if engine.graphs is None:
        pytest.skip("launched kernel by kernel")
    expect_plain_texts(engine)
    costs = engine.stats().costs
    assert costs is not None and costs.rows == [list(rows) for rows in levels.values()]
    raw, rng = Graphs.raw, random.Random(3)

    def exchanged(graphs: Graphs) -> dict[tuple[int, int, int], int]:
        by_size = raw(graphs)  # float32 has one bound of KV
        return {(b, n, most): by_size[b, rng.choice(levels[b]) if n > 0 else n, most] for b, n, most in by_size}

    monkeypatch.setattr(Graphs, "raw", exchanged)
    for _ in range(2):
        expect_plain_texts(make_engine(DRAFTS[name](tmp_path), device))


@every_draft
def test_an_adaptive_engine(name: str, device: torch.device, tmp_path: Path) -> None:
    """Measures, chooses, and says so; kernel by kernel on CUDA it does when it is asked to."""
    unless_asked = None if device.type == "cuda" else False
    engine = make_engine(DRAFTS[name](tmp_path), device, adaptive=unless_asked, cuda_graph=False)
    fixed = engine.stats()
    assert fixed.costs is None and fixed.rounds_by_nodes == {1: 0, engine.config.needs.num_nodes: 0}
    draft = DRAFTS[name](tmp_path)
    engine = make_engine(draft, device, adaptive=True, cuda_graph=False, batch_sizes=[2, 4])
    before = engine.stats()
    expect_plain_texts(engine)
    stats = engine.stats() - before
    assert stats.costs is not None and stats.costs.batches == [2, 4]
    levels = [budget_levels(batch, engine.config.needs.num_nodes) for batch in (2, 4)]
    assert list(stats.rounds_by_nodes) == [rows / 4 for rows in levels[1]]
    assert stats.costs.rows == [list(rows) for rows in levels]
    assert sum(stats.rounds_by_nodes.values()) == stats.rounds > 0


def test_budget_measurement_leaves_no_state(device: torch.device, tmp_path: Path) -> None:
    """No page, no text in the index but the corpus, nothing learnt."""
    (corpus := tmp_path / "corpus.txt").write_text("def area(width, height):\n    return width * height\n", "utf-8")
    draft = Union(Eagle3(HEAD, num_steps=3, topk=3, num_nodes=24), Ngram(num_nodes=24, corpus=[corpus]), num_nodes=24)
    engine = make_engine(draft, device, adaptive=True, cuda_graph=False, batch_sizes=[2, 4])
    assert engine.stats().costs is not None
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(engine.state.pool.num_free) == engine.config.num_pages
    assert engine.state.status.tolist() == engine.state.seq_lens.tolist() == [0] * engine.config.num_slots
    head, ngram = draft.members
    assert isinstance(head, Eagle3) and head.calibration is not None and not head.calibration.counts.any()
    assert isinstance(ngram, Ngram) and ngram.index.statistics.held == len(ngram._corpus[0])


@every_draft
def test_lower_budget_level_drafts_prefix_of_higher(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many paths; which is how a round shows what the levels below it would have accepted."""
    from support.manual_rounds import begin, run

    monkeypatch.setattr(ModelDraft, "num_branches", lambda draft, batch, num_nodes: draft.topk)

    engine = make_engine(DRAFTS[name](tmp_path), device)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    for slot in range(4):
        begin(engine, slot, prompts()[4 + slot])
    for _ in range(4):
        most = engine.config.needs.num_nodes
        whole = scored_tree_of(engine.draft.propose(slots, DraftBudget(most)).drafts, slots, most, engine.state).tree
        for nodes in budget_levels(1, most):
            tree = scored_tree_of(
                engine.draft.propose(slots, DraftBudget(nodes)).drafts, slots, nodes, engine.state
            ).tree
            assert tree.tokens.shape == (4, nodes)
            assert torch.equal(tree.num_nodes, whole.num_nodes.clamp(max=nodes))
            for row, size in enumerate(tree.num_nodes.tolist()):
                assert torch.equal(tree.tokens[row, :size], whole.tokens[row, :size])
                assert torch.equal(tree.parents[row, :size], whole.parents[row, :size])
        run(engine, slots.tolist())


def test_drawn_drafts_are_as_many_for_each_request(device: torch.device) -> None:
    """What is drawn does not decide whether it counts; greedy requests, whose drafts are the likeliest, show no other."""
    draft = Eagle3(HEAD, num_steps=5, topk=1, sampled=True)
    engine = make_engine(draft, device, adaptive=True, cuda_graph=False, batch_sizes=[2, 4])
    assert engine.config.rows == ((2, 4, 6, 8, 12), (4, 8, 12, 16, 24))
    commit, seen = engine.core.executor.round.commit, 0

    def looked_at(drafted: Drafted) -> Any:
        nonlocal seen
        result, num_rows, batch = commit(drafted), len(drafted.hidden), len(drafted.slots)
        assert num_rows % batch == 0 and set(result.num_nodes.tolist()) <= {0, num_rows // batch}
        seen += num_rows > batch or drafted.idle  # and no first round
        return result

    engine.core.executor.round.commit = looked_at  # type: ignore[method-assign]
    expect_plain_texts(engine)
    assert seen == engine.stats().rounds > 0


def test_budget_levels() -> None:
    assert budget_levels(1, 48) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    assert budget_levels(8, 48) == (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
    assert budget_levels(8, 48, equal=True) == (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
    assert budget_levels(5, 6) == (5, 7, 10, 15, 20, 30)
    assert budget_levels(4, 33) == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 132)  # 128 would be next to it
    assert budget_levels(3, 1) == (3,) and budget_levels(2, 6, adaptive=False) == (12,)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("num_nodes", [*range(1, 70), 255, 256])
def test_levels_are_next_to_each_other(num_nodes: int, equal: bool) -> None:
    for batch in range(1, 70):
        levels = budget_levels(batch, num_nodes, equal=equal)
        assert levels[0] == batch and levels[-1] == batch * num_nodes and len(levels) <= 17
        for low, high in pairwise(levels):
            assert low < high <= max(1.5 * low, 2 * batch if equal or batch == 1 else 0)
        assert not equal or not any(rows % batch for rows in levels)


def test_batch_invariant_engine_is_not_adaptive() -> None:
    with pytest.raises(ValueError, match=r"^Engine: adaptive is set, expected not with batch_invariant"):
        make_engine(Eagle3(HEAD), torch.device("cpu"), adaptive=True, batch_invariant=True)
