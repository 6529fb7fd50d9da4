"""Rest: where drafting does not pay the draft does not run, and has missed nothing when it drafts again."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import _C
from specdec_kernels.engine import Draft, Eagle, Eagle3, Engine, EngineOptions, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.config import EngineConfig, Machine
from specdec_kernels.engine.drafts import Committed, DraftBudget, DraftContext, Needs, PrefillRows, Proposal
from specdec_kernels.engine.drafts.composition import catch_up, leaves
from specdec_kernels.engine.drafts.model import MAX_IDLE_ROUNDS, ModelDraft
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.engine.tuning import SCHEMA, rounds_of
from specdec_kernels.models.weights.model_config import config_of
from specdec_kernels.tiny import tiny_model
from support.devices import HAS_CUDA
from support.eagle_heads import random_tensors, write_head
from support.exhaustive import representative, thinned
from support.manual_rounds import begin, prompts
from support.manual_rounds import run as run_round
from support.observed_rounds import launches_of
from support.tiny_checkpoint import Comparison, reference_model, reference_texts

HEAD = tiny_model("eagle3")
MAX_LEN, NEW_TOKENS = 128, 40


def eagle_head(folder: Path) -> Path:
    return folder if folder.exists() else write_head(folder, random_tensors(False))


DRAFTS: dict[str, Callable[[Path], Draft]] = {
    "eagle-chain": lambda path: Eagle(eagle_head(path / "head"), num_steps=3, topk=1),
    "eagle3-chain": lambda _: Eagle3(HEAD, num_steps=4, topk=1),
    "eagle3-tree": lambda _: Eagle3(HEAD, num_steps=3, topk=3, num_nodes=12),
    "eagle3-drawn": lambda _: Eagle3(HEAD, num_steps=3, topk=1, sampled=True),
    "standalone": lambda _: Standalone(tiny_model("target"), num_steps=3, topk=2, num_nodes=8),
    "eagle3+ngram": lambda _: Union(Eagle3(HEAD, num_steps=3, topk=2, num_nodes=8), Ngram(num_nodes=8), num_nodes=8),
}
every_draft = pytest.mark.parametrize("name", representative(DRAFTS))


def make_engine(draft: Draft | None, device: torch.device, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 3, "page_size": 4, "dtype": torch.float32}
    return Engine(tiny_model("target"), draft=draft, device=device, **(defaults | options))


def tuning_for(draft: Draft, us: list[float], device: torch.device, **options: Any) -> dict[str, Any]:
    """With such costs of the budget_levels at any batch size."""
    model = config_of(tiny_model("target"))
    sizes: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 3, "page_size": 4, "dtype": torch.float32}
    config = EngineConfig.resolve(model, draft, Machine.of(device), EngineOptions(adaptive=True, **(sizes | options)))
    rows = [list(each) for each in config.rows]
    each = [(us + us[-1:] * len(of_size))[: len(of_size)] for of_size in rows]
    catch_up = [us[0]] * len(rows) if config.max_idle_rounds else []
    costs = {"of": rounds_of(model, draft, config), "batches": list(config.batch_sizes), "rows": rows, "us": each}
    return {"schema": SCHEMA, "costs": {**costs, "catch_up": catch_up}}


def model_draft(engine: Engine) -> Any:
    """Of a union, the one with a model."""
    return next(part for part in leaves(engine.draft) if isinstance(part, ModelDraft))


def expect_same_state(idle: Any, awake: Any, slots: list[int], dtype: torch.dtype = torch.float32) -> None:
    """Compare the state that the next round drafts from. GEMMs of other shapes may round differently."""
    names = {"child_ids", "child_logprobs", "last_hidden", "root_logits"} & vars(idle).keys()
    names -= {"child_ids", "child_logprobs"} if idle.sampled else set()  # drawn when the round begins
    assert len(names) >= 1
    for name in names:
        got, want = getattr(idle, name)[slots], getattr(awake, name)[slots]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# --- round by round


@every_draft
def test_idle_draft_proposes_same_after_catch_up(name: str, device: torch.device, tmp_path: Path) -> None:
    """After a draft was idle, its state is that of a draft that never was.

    Slots join, stall, end and are reused in between, and backlogs fill up to their limit.
    """
    draft = DRAFTS[name](tmp_path)
    options: dict[str, Any] = {"num_slots": 4, "cuda_graph": False}
    tuning = tuning_for(draft, [1.0], device, **options)
    options["adaptive"] = True
    idle, awake = (make_engine(d, device, tuning=tuning, **options) for d in (draft, DRAFTS[name](tmp_path)))
    extend = awake.draft.extend
    awake.draft.extend = lambda slots, committed, *rest: extend(slots, committed._replace(idle=False), *rest)  # type: ignore[method-assign]
    most, (rests, follows) = idle.config.needs.num_nodes, map(model_draft, (idle, awake))
    backlog = 0

    def both(slots: list[int], nodes: int) -> None:
        nonlocal backlog
        if nodes > 1 or backlog == MAX_IDLE_ROUNDS:
            catch_up(idle.draft, torch.tensor(slots, dtype=torch.int32, device=device))
            live = [slot for slot in slots if slot >= 0 and not int(idle.state.finish_reasons[slot])]
            expect_same_state(rests, follows, live)
            backlog = 0
        backlog += nodes == 1
        assert run_round(idle, slots, nodes) == run_round(awake, slots, nodes)
        if backlog:
            assert rests.backlog_lens.max() <= backlog

    def join(slot: int, prompt: int, budget: int = 100) -> None:
        for engine in (idle, awake):
            begin(engine, slot, prompts()[prompt], budget=budget)

    join(0, 0)
    join(1, 1, budget=9)
    for nodes in (most, 1, most, 1, 1, 1, 2, 1):
        both([0, 1], nodes)
    join(2, 5)  # between two idle rounds: its backlog is smaller
    for nodes in (1, 1, most, most, 1):
        both([1, 2, -1, 0], nodes)
    assert int(idle.state.finish_reasons[1])  # by its budget, amid all this
    free = int(idle.state.pool.num_free[0])
    for engine in (idle, awake):
        engine.state.pool.num_free[0] = 0
    for _ in range(6):
        both([0, 2], 1)
    assert idle.state.status.any()  # somebody is stalled; catching up does not ask
    both([0, 2], most)
    for engine in (idle, awake):
        engine.state.pool.num_free[0] = free
    both([0, 2], most)
    join(1, 6)
    for _ in range(MAX_IDLE_ROUNDS + 3):  # the ring is full once
        both([0, 1, 2], 1)
    both([2, 0, 1], most)
    both([2, 0, 1], most)
    assert not idle.state.status.any() and not rests.backlog_lens.any()


def test_idle_round_runs_no_draft_model(device: torch.device, tmp_path: Path) -> None:
    for name in DRAFTS:
        draft = DRAFTS[name](tmp_path)
        tuning = tuning_for(draft, [1.0], device, cuda_graph=False)
        engine = make_engine(draft, device, adaptive=True, tuning=tuning, cuda_graph=False)
        begin(engine, 0, prompts()[0])
        calls: list[int] = []
        model: Any = model_draft(engine)
        module = model.lm if name == "standalone" else model.module
        method = "forward" if name == "standalone" else "pass_layers"
        run = getattr(module, method)
        counted = lambda *args, run=run, calls=calls, **more: calls.append(1) or run(*args, **more)  # noqa: E731
        setattr(module, method, counted)
        for _ in range(5):
            run_round(engine, [0], 1)
        assert not calls and model.backlog_lens.tolist() == [5, 0, 0, 0]
        catch_up(engine.draft, torch.tensor([0], dtype=torch.int32, device=device))
        assert len(calls) == 1 and not model.backlog_lens.any()


def test_idle_draft_backlog_overflow(device: torch.device) -> None:
    """Of a slot that rests for longer, which wants no drafts: the last rows are right, and nothing else is touched."""
    draft = Eagle3(HEAD, num_steps=3, topk=2)
    engine = make_engine(draft, device, adaptive=True, tuning=tuning_for(draft, [1.0], device), cuda_graph=False)
    for slot in range(2):
        begin(engine, slot, prompts()[slot])
    catch_up(draft, torch.tensor([0, 1], dtype=torch.int32, device=device))
    other = draft.backlog_tokens[1].clone()
    tokens = [run_round(engine, [0], 1)[0][0] for _ in range(MAX_IDLE_ROUNDS + 5)]
    kept = torch.tensor(tokens[5:], dtype=torch.int32, device=device)
    assert torch.equal(draft.backlog_tokens[0].roll(-5), kept) and torch.equal(draft.backlog_tokens[1], other)
    pools, hidden = draft.module.pools.layers[0].pools[0], draft.last_hidden.clone()
    pages = engine.state.pool.page_table[0].long()
    before = pools[pages].flatten(0, 1).clone()
    catch_up(draft, torch.tensor([0, 1], dtype=torch.int32, device=device))
    length, after = int(engine.state.seq_lens[0]), pools[pages].flatten(0, 1)
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [*range(length - MAX_IDLE_ROUNDS, length)]
    assert not torch.equal(draft.last_hidden[0], hidden[0]) and torch.equal(draft.last_hidden[1], hidden[1])


@pytest.mark.parametrize("name", ["eagle3-tree", "eagle3+ngram"])
def test_idle_for_good_updates_no_calibration(name: str, device: torch.device, tmp_path: Path) -> None:
    """The calibration is what it is without requests that want no drafts, whose own are those of another text."""
    counts = []
    for slots in ([1], [0, 1]):
        draft = DRAFTS[name](tmp_path)
        tuning = tuning_for(draft, [1.0], device, cuda_graph=False)
        engine = make_engine(draft, device, adaptive=True, tuning=tuning, cuda_graph=False)
        for slot in slots:
            begin(engine, slot, prompts()[slot])
        engine.state.max_nodes[0] = 1
        if 0 in slots:
            for _ in range(MAX_IDLE_ROUNDS + 4):
                run_round(engine, [0], 1)
        for _ in range(6):
            catch_up(draft, torch.tensor(slots, dtype=torch.int32, device=device))
            run_round(engine, slots)
        counts.append(model_draft(engine).calibration.counts[..., 0].sum(1).tolist())
    assert counts[0] == counts[1] and counts[0][0] > 5


# --- through the loop


class Twice(Draft):
    """A draft that is idle at times, and the same one that never is: what they propose must be the same."""

    def __init__(self, make: Callable[[], ModelDraft]) -> None:
        self.idles, self.follows = make(), make()
        self.compared = torch.zeros(2)

    @property
    def members(self) -> tuple[Draft, ...]:
        return self.idles, self.follows

    def needs(self, target: Any) -> Needs:
        needs = self.idles.needs(target)
        return replace(needs, kv_numbers=2 * needs.kv_numbers)

    def open(self, context: DraftContext) -> None:
        self.worst, self.compared = torch.zeros(1, device=context.device), torch.zeros(2, device=context.device)

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        self.idles.prefill(prefill, features)
        self.follows.prefill(prefill, features)

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        num_nodes = budget.num_nodes
        proposals = [draft.propose(slots, budget) for draft in self.members]
        if num_nodes > 1:
            trees = [scored_tree_of(p.drafts, slots, num_nodes, self.state) for p in proposals]
            rows = slots.clamp(min=0)
            lives = (slots >= 0) & (self.state.finish_reasons[rows] == 0) & (self.state.max_nodes[rows] > 1)
            same = (trees[0].tree.tokens == trees[1].tree.tokens).all(1) | ~lives
            self.compared += torch.stack([lives.sum(), (same & lives).sum()])
            far = (trees[0].scores - trees[1].scores).nan_to_num().abs().amax(1) * lives
            self.worst.copy_(torch.maximum(self.worst, far.max()))
        return proposals[0]._replace(note=proposals[1])

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        self.idles.extend(slots, committed, proposal, features)
        self.follows.extend(slots, committed._replace(idle=False), proposal.note, features)


TWICE: dict[str, Callable[[Path], Callable[[], ModelDraft]]] = {
    "eagle": lambda path: lambda: Eagle(eagle_head(path / "head"), num_steps=3, topk=2, num_nodes=6),
    "eagle3": lambda _: lambda: Eagle3(HEAD, num_steps=3, topk=2, num_nodes=6),
    "standalone": lambda _: lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=4),
}


@functools.cache
def plain_texts() -> list[list[int]]:
    return reference_texts(prompts(), NEW_TOKENS)


@pytest.mark.parametrize("name", thinned(TWICE, ("eagle3+ngram", "standalone").__contains__))
def test_idle_draft_with_joining_requests(name: str, device: torch.device, tmp_path: Path) -> None:
    """Run rounds of any kind in any order, in a pool from which requests are retracted.

    Some requests are cancelled, and some want no drafts.
    """
    draft = Twice(TWICE[name](tmp_path))
    rng = random.Random(7)
    options: dict[str, Any] = {"num_slots": 4, "num_pages": 60, "cuda_graph": False}
    tuning = tuning_for(draft, [1.0], device, **options)
    engine = make_engine(draft, device, adaptive=True, tuning=tuning, **options)
    round, most = engine.core.executor.round, engine.config.needs.num_nodes
    run, kinds = round.run_target, {"rest": 0, "catch up": 0}
    backlog: dict[int, int] = {}

    def chosen(slots: Tensor, num_rows: int, max_kv_len: int) -> Any:
        """In place of the budget, which goes by the clock."""
        if num_rows == _C.FIRST_ROUND:
            return run(slots, num_rows, max_kv_len)
        batch = len(slots)
        rows = rng.choice([batch, batch, batch, 3 * batch // 2, 2 * batch, batch * most])
        nodes, live = 1 if rows == batch else 2, [slot for slot in slots.tolist() if slot >= 0]
        if max(backlog.get(slot, 0) for slot in live) >= (MAX_IDLE_ROUNDS if nodes == 1 else 1):
            catch_up(draft, slots, max_kv_len)
            backlog.update(dict.fromkeys(live, 0))
            kinds["catch up"] += 1
        for slot in live if nodes == 1 else ():
            backlog[slot] = backlog.get(slot, 0) + 1
            kinds["rest"] += 1
        return run(slots, rows, max_kv_len)

    round.run_target = chosen  # type: ignore[method-assign]
    cancelled = engine.submit(prompts()[0], SamplingParams(60, ignore_eos=True))
    params = [SamplingParams(NEW_TOKENS, speculation="off" if i == 2 else "on") for i in range(len(prompts()))]
    requests = engine.submit_many(prompts(), params)
    next(iter(cancelled))
    cancelled.cancel()
    comparison = Comparison(reference_model())
    for prompt, request, want in zip(prompts(), requests, plain_texts(), strict=True):
        comparison.check(prompt, request.result().tokens, want)
    assert len(comparison.near_ties) <= 1
    num_compared, num_same = draft.compared.tolist()
    assert kinds["rest"] > 20 and kinds["catch up"] > 5 and num_compared > 20
    assert num_same == num_compared and float(draft.worst) < 1e-3
    engine.close()


@every_draft
def test_engine_with_idle_drafts_keeps_texts(name: str, device: torch.device, tmp_path: Path) -> None:
    """As its costs suggest: no text changes, and full rings are emptied."""
    draft = DRAFTS[name](tmp_path)
    tuning = tuning_for(draft, [1.0, 1e9], device)
    engine = make_engine(draft, device, adaptive=True, tuning=tuning)
    launched = launches_of(engine)
    outputs = engine.generate(prompts(), SamplingParams(NEW_TOKENS, ignore_eos=True))
    for prompt, output, want in zip(prompts(), outputs, plain_texts(), strict=True):
        Comparison(reference_model()).check(prompt, output.tokens[: len(want)], want)
        assert output.stats.rounds == NEW_TOKENS - 1 and output.stats.drafted == 0
    assert engine.stats().rounds_by_nodes[1] == engine.stats().rounds
    kept = int(model_draft(engine).backlog_lens.max())
    assert 0 < kept <= MAX_IDLE_ROUNDS
    if engine.graphs is None:
        catch_ups = [batch for batch, rows, _ in launched if batch and not rows]
        assert len(prompts()) * NEW_TOKENS / 3 / MAX_IDLE_ROUNDS / 3 < len(catch_ups) < len(launched) / 4


@pytest.mark.parametrize("adaptive", [True, False])
def test_requests_that_want_no_drafts_rest_for_good(adaptive: bool, device: torch.device) -> None:
    """Rounds of one node, in any engine, as long as nobody else is there; nothing has to catch up with them."""
    draft = Eagle3(HEAD, num_steps=3, topk=2, num_nodes=8)
    tuning = tuning_for(draft, [1e9, 1.0], device, cuda_graph=False)
    engine = make_engine(draft, device, adaptive=adaptive, tuning=tuning, cuda_graph=False)
    launched = launches_of(engine)
    off = SamplingParams(NEW_TOKENS, ignore_eos=True, speculation="off")
    outputs = engine.generate(prompts(), off)
    assert [output.stats.rounds for output in outputs] == [NEW_TOKENS - 1] * len(prompts())
    assert all(rows in (batch, _C.FIRST_ROUND) for batch, rows, _ in launched)
    assert engine.stats().rounds_by_nodes[1] == engine.stats().rounds > 0
    launched.clear()
    both = [off, SamplingParams(NEW_TOKENS, ignore_eos=True)]
    want = [output.tokens for output in outputs[:2]]
    got = engine.generate(prompts()[:2], both)
    assert [output.tokens for output in got] == want
    assert got[0].stats.drafted == 0 < got[1].stats.drafted
    assert any(rows > batch for batch, rows, _ in launched)
    assert sum(engine.stats().rounds_by_nodes.values()) == engine.stats().rounds > engine.stats().rounds_by_nodes[1]


def test_batch_invariant_engine_has_one_round_size(device: torch.device) -> None:
    engine = make_engine(Eagle3(HEAD, num_steps=3, topk=2, num_nodes=8), device, batch_invariant=True, cuda_graph=False)
    assert (engine.config.plain_rounds, engine.config.max_idle_rounds) == (False, 0)
    launched = launches_of(engine)
    engine.generate(prompts()[:3], SamplingParams(6, speculation="off"))
    assert {(batch, rows) for batch, rows, _ in launched if batch} == {(3, 24), (3, _C.FIRST_ROUND)}


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=8)], ids=["none", "ngram"])
def test_draft_without_model_is_never_idle(draft: Draft | None, device: torch.device) -> None:
    engine = make_engine(draft, device, adaptive=True, cuda_graph=False)
    assert engine.config.max_idle_rounds == 0
    costs = engine.stats().costs
    assert costs is None if draft is None else costs is not None and costs.catch_up == []
    engine.close()


@pytest.mark.usefixtures("measured_costs")
def test_catch_up_cost_is_measured_and_saved(device: torch.device) -> None:
    engine = make_engine(Eagle3(HEAD, topk=1), device, adaptive=True, cuda_graph=False, batch_sizes=[2, 3])
    costs = engine.stats().costs
    assert costs is not None and len(costs.catch_up) == 2 and min(costs.catch_up) > 0
    assert engine.tuning["costs"]["catch_up"] == costs.catch_up
    again = make_engine(
        Eagle3(HEAD, topk=1), device, adaptive=True, cuda_graph=False, batch_sizes=[2, 3], tuning=engine.tuning
    )
    taken = again.stats().costs
    assert taken is not None and taken.catch_up == costs.catch_up


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", TWICE)
def test_captured_catch_up_pass(name: str, tmp_path: Path) -> None:
    """With what its graph finds in the record of commands: two slots of three, and an empty row."""
    draft = Twice(TWICE[name](tmp_path))
    engine = make_engine(draft, torch.device("cuda"), adaptive=True, batch_sizes=[3])
    assert engine.graphs is not None
    for slot in range(3):
        begin(engine, slot, prompts()[slot])
    for slots in ([0, 1, 2], [0, 2], [2], [2, 0]):
        run_round(engine, slots, 1)
    assert draft.idles.backlog_lens.tolist() == [3, 1, 4, 0]
    rings = engine.core.executor.round.rings
    record = rings.commands[int(rings.num_applied) % len(rings.commands)]
    record.fill_(-1)
    record[2:5] = torch.tensor([2, -1, 0])
    (graph,) = (graph for size, [graph] in engine.graphs.by_size.items() if size[:2] == (3, _C.CATCH_UP))
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert draft.idles.backlog_lens.tolist() == [0, 1, 0, 0]
    expect_same_state(draft.idles, draft.follows, [0, 2])
    draft.compared.zero_()  # which the rounds that were timed have counted, too
    run_round(engine, [0, 2], engine.config.needs.num_nodes)
    assert draft.compared.tolist() == [2, 2]


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_captured_rounds_propose_what_they_would_without_rest() -> None:
    """As the budget has it, with two rounds in flight."""
    for name in ("eagle3", "standalone"):
        draft = Twice(TWICE[name](Path()))
        engine = make_engine(draft, torch.device("cuda"), adaptive=True, num_slots=8)
        assert engine.graphs is not None and any(nodes == 0 < batch for batch, nodes, _ in engine.graphs.by_size)
        outputs = engine.generate(prompts(), SamplingParams(NEW_TOKENS))
        for prompt, output, want in zip(prompts(), outputs, plain_texts(), strict=True):
            Comparison(reference_model()).check(prompt, output.tokens, want)
        num_compared, num_same = draft.compared.tolist()
        assert num_same >= 0.99 * num_compared > 0 and float(draft.worst) < 1e-2
        engine.close()


# --- the budget


def budget(catch_up: float, drafting: float = 10.0) -> _C.Budget:
    return _C.Budget(_C.RoundCosts([1], [[1, 2]], [[100.0, 100.0 + drafting]], [catch_up]), 4, max_idle_rounds=16)


def test_idle_costs_what_catching_up_takes_in_the_end() -> None:
    """A sixteenth of it a round: drafts that bring 5 % at 10 % more pay where idle costs 5 % more."""
    for cost, level in ((30.0, 0), (200.0, 1)):
        made = budget(cost)
        for _ in range(200):
            made.update_gain(0, 1, 1, [0.0, 0.0], [0.0, 0.0])  # forgets the guess that all drafts are right
        for _ in range(300):
            made.update_gain(0, 1, 1, [0.0, 0.05], [0.0, 0.05])
        assert made.next_level(0, 1, 0, 16) == level


def test_idle_ends_when_loss_equals_catch_up_cost() -> None:
    """A draft resumes once its idle rounds have lost as many tokens as catching up costs.

    An idle round loses what drafting would have gained in its time. Catching up is charged less for a larger backlog.
    """
    made = budget(catch_up=150.0)  # and a draft that is right, for all that is known
    at_rest = 100 + 150 / 16
    lost = at_rest * (2 / 110 * at_rest - 1)
    assert lost < 150 * (1 - 1 / 16) and 2 * lost > 150 * (1 - 2 / 16)
    assert made.next_level(0, 1, 0, 0) == 1  # no draft has a backlog: there is nothing to pay
    assert [made.next_level(0, 1, 0, backlog) for backlog in (1, 2)] == [0, 1]
    assert made.next_level(0, 1, 0, 16) == 1


@pytest.mark.parametrize("catch_up", [1.0, 100.0, 800.0])
def test_exploration_pays_for_catch_up(catch_up: float) -> None:
    """Drafts that are all wrong are tried all the same, and all of it takes 2 % at most."""
    made, backlog, tried, us = budget(catch_up, drafting=100.0), 0, 0, 0.0
    for _ in range(200):
        made.update_gain(0, 1, 1, [0.0, 0.0], [0.0, 0.0])
    for _ in range(20_000):
        level = made.next_level(0, 1, 0, backlog)
        if backlog and (level or backlog == 16):
            us, backlog = us + catch_up, 0
        us += 100 + 100 * level
        made.update_cost(0, level, 1, 0, 100.0 + 100.0 * level)
        made.update_gain(0, level, 1, [0.0, 0.0][: level + 1], [0.0, 0.0][: level + 1])
        tried, backlog = tried + level, 0 if level else backlog + 1
    assert tried > 100
    assert us < 1.02 * 20_000 * (100 + catch_up / 16)
