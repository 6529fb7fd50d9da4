"""The calibration of an engine's drafts, and what `Engine.tuning` keeps of it and of what rounds cost."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_kernels as sd
from specdec_kernels.engine import Committed, Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.drafts.model import ModelDraft
from specdec_kernels.engine.tuning import calibrated_parts, costs_for
from specdec_kernels.reference import draft as reference
from specdec_kernels.status import FinishReason, Status
from specdec_kernels.tiny import tiny_model
from support import round_costs
from support.exhaustive import covering, exhaustive, thinned
from support.tiny_checkpoint import held_out

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
SLOTS = 4
GREEDY = SamplingParams(72, ignore_eos=True)
DRAFTS: dict[str, Callable[[], Draft]] = {
    "tree": lambda: Eagle3(HEAD, num_steps=3, topk=4, num_nodes=12),
    "chain": lambda: Eagle3(HEAD, num_steps=4, topk=1),
    "model": lambda: Standalone(TARGET, num_steps=2, topk=2, num_nodes=6),
    "union": lambda: Union(Eagle3(HEAD, num_steps=3, topk=4, num_nodes=12), Ngram(num_nodes=8), num_nodes=12),
    "two models": lambda: Union(Standalone(TARGET, num_steps=2, topk=2), Eagle3(HEAD, num_steps=4, topk=1)),
}


def make_engine(draft: Draft | None, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"max_len": 256, "num_slots": SLOTS, "adaptive": False, "device": "cpu"}
    return Engine(TARGET, draft=draft, **(sizes | options))


def prompts(begin: int, end: int) -> list[list[int]]:
    return [prompt[:50] for prompt in held_out("code")[begin:end]]


class Watched(NamedTuple):
    """What a part of a draft said in rounds of requests that went on, and what came."""

    expected: float  # tokens, by its scores
    realised: int
    nodes: list[
        tuple[int, float, bool]
    ]  # whose parent was visited: the depth, the log-probability, whether it was taken

    def loss(self, table: Tensor) -> float:
        """Mean -log p of what became of the nodes of a draft that is not calibrated, were it by this table."""
        total = 0.0
        for depth, said, taken in self.nodes:
            x = float(reference.calibrated(table, depth, torch.tensor(said)).clamp(max=-6e-6))
            total -= x if taken else math.log(-math.expm1(x))
        return total / len(self.nodes)


def watch(engine: Engine, begin: int, end: int, params: SamplingParams = GREEDY) -> Watched:
    (part,) = calibrated_parts(engine.draft)
    extend, expected, realised, nodes = part.extend, 0.0, 0, []

    def look(slots: Tensor, committed: Committed, *rest: Any) -> None:
        nonlocal expected, realised
        (tree, scores), accepted = committed.tree, committed.accepted
        for b, count in enumerate(committed.num_valid.tolist()):
            if count == 0:
                continue
            path, emitted = accepted.path[b, :count].tolist(), accepted.tokens[b].tolist()
            for i in range(1, int(tree.num_nodes[b])):
                parent = int(tree.parents[b, i])
                if parent in path:
                    taken = emitted[path.index(parent)] == int(tree.tokens[b, i])
                    depth = int(tree.positions[b, i] - tree.positions[b, 0])
                    nodes.append((depth, float(scores[b, i] - scores[b, parent]), taken))
            expected += float(scores[b, : int(tree.num_nodes[b])].exp().sum())
            realised += count
        extend(slots, committed, *rest)

    part.extend = look  # type: ignore[method-assign]
    engine.generate(prompts(begin, end), params)
    del part.extend  # type: ignore[method-assign]
    return Watched(expected, realised, nodes)


# --- learning


@pytest.mark.parametrize(("name", "off"), [("tree", 0.08), *exhaustive(("chain", 0.14))])
def test_calibration_matches_acceptance(name: str, off: float) -> None:
    """Of some hundred rounds, on texts that the calibration has not seen; and while it learns."""
    with closing(make_engine(DRAFTS[name](), num_slots=12)) as engine:
        watch(engine, 0, 12)
        later, tuning = watch(engine, 0, 12), engine.tuning
    frozen = make_engine(DRAFTS[name](), num_slots=16, batch_invariant=True)
    learnt = make_engine(DRAFTS[name](), num_slots=16, batch_invariant=True, tuning=tuning)
    without, with_it = watch(frozen, 12, 28), watch(learnt, 12, 28)
    assert min(later.realised, with_it.realised) > 700
    assert without.expected < (1 - off) * without.realised
    for seen in (later, with_it):
        assert seen.expected == pytest.approx(seen.realised, rel=0.05)
    table = torch.tensor(tuning["calibrations"][0]["table"])
    assert without.loss(table) < 0.95 * without.loss(identity(1))


@pytest.mark.parametrize("name", thinned(DRAFTS, ("chain", "union", "two models").__contains__))
def test_what_is_learnt_is_what_became_of_the_drafts_own_nodes(name: str) -> None:
    """Against the reference, round by round; of two drafts united each learns of its own tree, node for node."""
    engine = make_engine(DRAFTS[name](), num_pages=150)
    rounds = [held_to_the_reference(part) for part in calibrated_parts(engine.draft)]
    params = [SamplingParams(9 + 3 * i, temperature=i % 2, seed=i) for i in range(7)]  # ends are in the midst of rounds
    engine.generate(prompts(7, 14), params)
    assert rounds and all(sum(round) > 30 for round in rounds)
    assert not torch.equal(calibrated_parts(engine.draft)[0].calibration.table, identity(2))  # type: ignore[union-attr]


def identity(depths: int) -> Tensor:
    return torch.tensor([[1.0, 0.0]] * depths)


def held_to_the_reference(part: ModelDraft) -> list[int]:
    """Check a draft's calibration against the reference; return the nodes that each of its rounds learns from."""
    learn, counted = part.learn, []

    def compare(committed: Committed) -> None:
        assert part.calibration is not None
        want = sd.Calibration(*(field.clone() for field in part.calibration))
        reference.update_calibration(want, *committed.tree, committed.accepted)
        before = int(part.calibration.counts[..., 0].sum())
        learn(committed)
        assert torch.equal(part.calibration.counts[..., :2].sum(1), want.counts[..., :2].sum(1))
        torch.testing.assert_close(part.calibration.table, want.table.float(), rtol=0.05, atol=0.05)
        counted.append(int(part.calibration.counts[..., 0].sum()) - before)

    part.learn = compare  # type: ignore[method-assign]
    return counted


def test_rows_without_a_round_teach_nothing() -> None:
    """Empty, finished and stalled ones; a round of a node each, neither."""
    engine = make_engine(DRAFTS["tree"]())
    engine.generate(prompts(0, 4), SamplingParams(8, ignore_eos=True))  # leaves drafts in the slots
    (part,) = calibrated_parts(engine.draft)
    assert part.calibration is not None
    before, state, round = copy.deepcopy(part.calibration), engine.state, engine.core.executor.round
    state.finish_reasons[0] = int(FinishReason.STOP)
    state.seq_lens[1], state.finish_reasons[1] = 40, int(FinishReason.RUNNING)
    state.pool.num_free[0] = 0
    with torch.inference_mode():
        round.commit(round.run_target(torch.tensor([-1, 0, 1], dtype=torch.int32), 36))
    assert int(state.status[1]) & int(Status.STALLED)
    with torch.inference_mode():
        round.commit(round.run_target(torch.tensor([2, 3], dtype=torch.int32), 2))
    assert all(torch.equal(a, b) for a, b in zip(part.calibration, before, strict=True))


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_invariant_engine_keeps_what_it_has(given: bool) -> None:
    tuning = tuned("tree") if given else None
    engine = make_engine(DRAFTS["tree"](), batch_invariant=True, tuning=tuning)
    engine.generate(prompts(0, 4), GREEDY)
    (entry,) = engine.tuning["calibrations"]
    if tuning:
        assert entry == tuning["calibrations"][0] and entry["table"] != identity(3).tolist()
    else:
        assert entry["table"] == identity(3).tolist() and not torch.tensor(entry["counts"]).any()


def test_drawn_drafts_have_no_calibration() -> None:
    draft = Eagle3(HEAD, num_steps=4, topk=1, sampled=True)
    engine = make_engine(draft, tuning=tuned("chain"))
    engine.generate(prompts(0, 2), SamplingParams(12, temperature=1.0, seed=1))
    assert draft.calibration is None and engine.tuning["calibrations"] == []


def test_calibration_ends_with_engine() -> None:
    draft = DRAFTS["tree"]()
    with make_engine(draft) as engine:
        engine.generate(prompts(0, 2), GREEDY)
    assert "calibration" not in vars(draft)
    with pytest.raises(RuntimeError, match="Engine is closed, expected an open one"):
        _ = engine.tuning
    with make_engine(draft) as engine:
        assert engine.tuning["calibrations"][0]["table"] == identity(3).tolist()


@pytest.mark.parametrize(("name", "is_tuned"), covering(["tree", "two models"], [False, True]))
def test_engine_that_does_not_calibrate_keeps_the_scores_it_starts_with(name: str, is_tuned: bool) -> None:
    given = {"tuning": tuned(name)} if is_tuned else {}
    with make_engine(DRAFTS[name](), **given) as engine:
        texts = [output.tokens for output in engine.generate(prompts(2, 4), GREEDY)]
        learnt = engine.tuning["calibrations"]
    with make_engine(DRAFTS[name](), calibrate=False, **given) as engine:
        start = engine.tuning["calibrations"]
        assert [output.tokens for output in engine.generate(prompts(2, 4), GREEDY)] == texts
        assert engine.tuning["calibrations"] == start != learnt
    assert start == (tuned(name)["calibrations"] if is_tuned else start)
    tables = [entry["table"] for entry in start]
    assert is_tuned or tables == [identity(len(table)).tolist() for table in tables]


# --- keeping it

TUNED: dict[str, dict[str, Any]] = {}


def tuned(name: str) -> dict[str, Any]:
    """Return the tuning of an engine with this draft after some requests."""
    if name not in TUNED:
        with closing(make_engine(DRAFTS[name]())) as engine:
            engine.generate(prompts(0, 4), GREEDY)
            TUNED[name] = engine.tuning
    return copy.deepcopy(TUNED[name])


@pytest.mark.parametrize("name", thinned(DRAFTS, ("union", "two models").__contains__))
def test_tuning_roundtrip(name: str, tmp_path: Path) -> None:
    tuning, file = tuned(name), tmp_path / "tuning.json"
    file.write_text(json.dumps(tuning))
    for source in (file, str(file), tuning):
        with closing(make_engine(DRAFTS[name](), tuning=source)) as engine:
            again = engine.tuning
            assert again == tuning
            for part, entry in zip(calibrated_parts(engine.draft), tuning["calibrations"], strict=True):
                assert part.calibration is not None
                assert torch.equal(part.calibration.table, torch.tensor(entry["table"]))
                assert torch.equal(part.calibration.counts, torch.tensor(entry["counts"]))
    assert again["calibrations"][0]["table"] != identity(len(again["calibrations"][0]["table"])).tolist()


def test_tuning_missing_depths_start_empty() -> None:
    tuning = tuned("tree")
    (entry,) = tuning["calibrations"]
    deeper = make_engine(Eagle3(HEAD, num_steps=5, topk=1), tuning=tuning).tuning["calibrations"][0]
    assert deeper["table"] == entry["table"] + identity(2).tolist()
    flatter = make_engine(Eagle3(HEAD, num_steps=2, topk=8), tuning=tuning).tuning["calibrations"][0]
    assert (flatter["table"], flatter["counts"]) == (entry["table"][:2], entry["counts"][:2])


def test_two_drafts_with_one_model_keep_theirs_apart() -> None:
    def draft() -> Draft:
        return Union(Eagle3(HEAD, num_steps=3, topk=4), Eagle3(HEAD, num_steps=3, topk=1))

    with closing(make_engine(draft())) as engine:
        engine.generate(prompts(0, 2), GREEDY)
        tuning = engine.tuning
    first, second = tuning["calibrations"]
    assert first["table"] != second["table"]
    assert make_engine(draft(), tuning=tuning).tuning["calibrations"] == [first, second]


def test_drafts_without_a_model_have_no_use_for_it() -> None:
    for draft in (None, Ngram()):
        assert make_engine(draft, tuning=tuned("tree")).tuning["calibrations"] == []


def test_names_are_those_of_folders_and_modules() -> None:
    (entry,) = tuned("tree")["calibrations"]
    assert (entry["draft"], entry["model"], entry["target"]) == ("Eagle3", "eagle3", "target")
    loaded = make_engine(None).target.model
    draft = Standalone(loaded, num_steps=2, topk=2, num_nodes=6)
    with closing(Engine(loaded, draft=draft, device="cpu", adaptive=False, tuning=tuned("model"))) as engine:
        assert engine.tuning["calibrations"] == tuned("model")["calibrations"]


# --- what rounds cost


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Any]]:
    """Yield a tuning whose costs no machine would measure."""
    with round_costs.measured(), closing(make_engine(DRAFTS["chain"](), adaptive=True)) as engine:
        tuning = engine.tuning
    assert tuning["costs"]["batches"] == [1, 2, 3, 4] and tuning["costs"]["rows"][1] == [2, 3, 4, 6, 8, 10]
    tuning["costs"]["us"] = [
        [1e9 * batch + level for level in range(len(rows))] for batch, rows in enumerate(tuning["costs"]["rows"], 1)
    ]
    yield json.loads(json.dumps(tuning))


def test_tuning_costs_of_same_rounds_are_reused(measured: dict[str, Any]) -> None:
    with closing(make_engine(DRAFTS["chain"](), adaptive=True, tuning=measured)) as engine:
        costs = engine.stats().costs
        assert costs is not None and costs.us == measured["costs"]["us"]
        assert engine.tuning["costs"] == measured["costs"]
        engine.generate(prompts(0, 2), SamplingParams(8))


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize(
    "other",
    [
        {"num_slots": 3},
        {"draft": Eagle3(HEAD, num_steps=3, topk=1)},
        {"draft": Eagle3(HEAD, num_steps=4, topk=2, num_nodes=5)},
        {"dtype": torch.bfloat16},
    ],
    ids=["slots", "steps", "branches", "dtype"],
)
def test_tuning_costs_of_other_rounds_are_remeasured(measured: dict[str, Any], other: dict[str, Any]) -> None:
    options = {"draft": DRAFTS["chain"](), "adaptive": True, "tuning": measured} | other
    with closing(make_engine(options.pop("draft"), **options)) as engine:
        costs = engine.stats().costs
        assert costs is not None and max(map(max, costs.us)) < 1e9
        assert engine.tuning["costs"]["us"] == costs.us


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("name", ["chain", "union"])
def test_measuring_leaves_calibrations_as_they_were_given(name: str) -> None:
    with closing(make_engine(DRAFTS[name](), adaptive=True, tuning=tuned(name))) as engine:
        assert engine.stats().costs is not None
        assert engine.tuning["calibrations"] == tuned(name)["calibrations"]


def test_tuning_cost_key(measured: dict[str, Any]) -> None:
    with closing(make_engine(DRAFTS["chain"](), adaptive=True, tuning=measured)) as engine:
        config, rounds = engine.config, engine.tuning["costs"]["of"]
    assert (rounds["device"], rounds["target"]["num_hidden_layers"], rounds["kv_dtype"]) == ("cpu", 4, "torch.float32")
    assert rounds["draft"]["parts"] == [["Eagle3", "eagle3"]]
    assert costs_for(measured, rounds, config) is not None
    for key in rounds:
        assert costs_for(measured, rounds | {key: "another"}, config) is None
    assert costs_for(tuned("tree"), rounds, config) is None


def test_tuning_of_fixed_engine_has_no_costs(measured: dict[str, Any]) -> None:
    with closing(make_engine(DRAFTS["chain"](), tuning=measured)) as engine:
        assert engine.tuning["costs"] is None and engine.stats().costs is None


# --- refusals

EXPECTED = "expected what `specdec tune --out` or `Engine.tuning` gave"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", f", which is not JSON, {EXPECTED}"),
        ("[" * 200_000, f", which is not JSON, {EXPECTED}"),
        ("[]", f" without a schema, {EXPECTED}"),
        ("{}", f" without a schema, {EXPECTED}"),
        ('{"schema": 2}', " of schema 2, expected schema 1"),
    ],
)
def test_tuning_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        Engine("nowhere", tuning=file)
    assert str(error.value) == f"Engine: tuning is {file}{message}"


NO_CALIBRATION = (
    "Engine: tuning is a dict with calibrations[0] that is none, expected draft, model, target, a table [D, 2] and "
    "counts [D, 16, 3]"
)
NO_COSTS = "Engine: tuning is a dict with costs that are none, expected of, batches, rows, us, catch_up"


def set_in(entry: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("calibrations",), 3, NO_CALIBRATION),
        (("calibrations", 0), None, NO_CALIBRATION),
        (("calibrations", 0, "table"), [[1.0, 0.0]], NO_CALIBRATION),
        (("calibrations", 0, "table", 0), [math.nan, 0.0], NO_CALIBRATION),
        (("calibrations", 0, "table", 0), [-1.0, 0.0], NO_CALIBRATION),
        (("calibrations", 0, "table", 0), ["1", 0.0], NO_CALIBRATION),
        (("calibrations", 0, "counts", 0, 0), [1, 2, 0], NO_CALIBRATION),
        (("calibrations", 0, "counts", 0, 0), [1.5, 0, 0], NO_CALIBRATION),
        (("calibrations", 0, "counts", 0, 0), [2**70, 0, 0], NO_CALIBRATION),
        (("calibrations", 0, "counts", 0, 0), [2**14 + 1, 0, 0], NO_CALIBRATION),
        (("calibrations", 0, "counts", 0, 0), [1, 0, -(2**63)], NO_CALIBRATION),
        (("costs",), 3, NO_COSTS),
        (("costs", "of"), None, NO_COSTS),
        (("costs", "us", 0, 0), -1.0, NO_COSTS),
        (("costs", "rows", 0), [1], NO_COSTS),
    ],
)
def test_tuning_bad_dict_is_refused(path: tuple[Any, ...], value: Any, message: str, measured: dict[str, Any]) -> None:
    tuning = copy.deepcopy(measured)
    set_in(tuning, path, value)
    with pytest.raises(ValueError) as error:
        Engine("nowhere", tuning=tuning)
    assert str(error.value) == message


def test_a_calibration_of_another_draft() -> None:
    with pytest.raises(ValueError) as error:
        make_engine(DRAFTS["model"](), tuning=tuned("two models") | {"calibrations": tuned("tree")["calibrations"]})
    assert str(error.value) == (
        "Engine: tuning has a calibration of Eagle3 (eagle3) for target, expected one of Standalone (target) for target"
    )
    others = tuned("two models")
    for entry in others["calibrations"]:
        entry["target"] = "another"
    with pytest.raises(ValueError) as error:
        make_engine(DRAFTS["chain"](), tuning=others)
    assert str(error.value) == (
        "Engine: tuning has a calibration of Standalone (target) for another and Eagle3 (eagle3) for another, "
        "expected one of Eagle3 (eagle3) for target"
    )


def test_tuning_refuses_other_values(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_engine(None, tuning=tmp_path / "none.json")


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("vocab_size", [1, 8, 15])
def test_adaptive_engine_of_small_vocabulary_measures_rounds(vocab_size: int) -> None:
    """Nucleotides have 8 tokens: the rounds that are timed begin with distinct tokens of the vocabulary."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, head_dim=64, num_key_value_heads=1, **sizes, **ids))
    options = {"max_len": 64, "page_size": 4, "dtype": torch.float32, "device": "cpu"}
    with Engine(model, draft=Ngram(num_nodes=4), num_slots=16, adaptive=True, **options) as engine:
        (output,) = engine.generate([[0, 0]], SamplingParams(8))
    assert len(output.tokens) == 8 and set(output.tokens) <= set(range(vocab_size))
