"""Synthetic models: targets continue their text, and drafts are accepted at the chosen rate; rounds are timed on them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from specdec_kernels.cli import main
from specdec_kernels.engine import MTP, Eagle3, Engine, NewTokens, SamplingParams, Standalone
from specdec_kernels.models.families import family_of
from specdec_kernels.status import FinishReason
from specdec_kernels.synthetic.acceptance import EvenAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm, synthetic_eagle3
from specdec_kernels.synthetic.mtp import synthetic_mtp_heads
from specdec_kernels.synthetic.shapes import SHAPES, draft_vocab_of, full_attention_of, shape_config
from support.exhaustive import exhaustive

rounds = pytest.importorskip("specdec_kernels.bench.engine.round", reason="bench/ is not beside the package here")

CPU = torch.device("cpu")


def tiny_text() -> SyntheticText:
    config = shape_config("tiny")
    return SyntheticText.of(config.vocab_size, draft_vocab_of(config))


def run(draft: str, accept: float, topk: int, nodes: int, device: torch.device, rank: int = 0) -> float:
    """Return the accept length of one long request, whose text is checked."""
    config, text = shape_config("tiny"), tiny_text()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = synthetic_causal_lm(config, text, device=device, dtype=dtype)
    acceptance = EvenAcceptance(accept, rank)
    if draft == "EAGLE3":
        model = synthetic_eagle3(target, text, acceptance)
    elif draft == "MTP":
        model = synthetic_mtp_heads(target, text, acceptance)
    else:
        model = synthetic_causal_lm(config, text, device=device, dtype=dtype, acceptance=acceptance)
    options = {"num_steps": 4, "topk": topk, "num_nodes": nodes}
    proposer = {"EAGLE3": Eagle3, "MTP": MTP, "STANDALONE": Standalone}[draft](model, **options)
    engine = Engine(target, draft=proposer, adaptive=False, max_len=256, num_slots=2, device=device, dtype=dtype)
    prompts = [text.tokens(3, 10), text.tokens(600, 21)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=140))
    assert outputs[0].tokens == text.tokens(13, 140)
    assert outputs[1].tokens == text.tokens(621, 140)
    return sum(len(o.tokens) - 1 for o in outputs) / sum(o.stats.rounds for o in outputs)


@pytest.mark.parametrize("draft", ["EAGLE3", "MTP", "STANDALONE"])
@pytest.mark.parametrize(("topk", "nodes"), [(1, 5), (4, 12)])
def test_synthetic_accept_length_equals_requested(draft: str, topk: int, nodes: int, device: torch.device) -> None:
    assert run(draft, 2.5, topk, nodes, device) == pytest.approx(2.5, abs=0.06)


@pytest.mark.parametrize(("asked", "reached"), [(1.0, 1.0), (math.inf, 5.0)])
def test_synthetic_acceptance_of_zero_and_one(asked: float, reached: float) -> None:
    assert run("EAGLE3", asked, 1, 5, CPU) == pytest.approx(reached, abs=0.1)


def test_synthetic_later_rank_is_found_by_trees_alone() -> None:
    assert run("STANDALONE", math.inf, 1, 5, CPU, rank=1) == 1.0
    # The second best of the second best is a candidate, but its children are none: two wrong paths are likelier.
    assert run("STANDALONE", math.inf, 2, 15, CPU, rank=1) == pytest.approx(3.0, abs=0.1)


def test_synthetic_text_stays_in_draft_vocabulary() -> None:
    text = SyntheticText.of(100, 30, seed=5)
    assert sorted(text.order.tolist()) == text.draft_ids.tolist()
    assert text.draft_ids.max() < 100 and len(set(text.draft_ids.tolist())) == 30
    assert text.tokens(28, 4) == [*text.order[28:].tolist(), *text.order[:2].tolist()]


def test_synthetic_second_text_uses_remaining_vocabulary(device: torch.device) -> None:
    text = SyntheticText.of(100, 30, seed=5)
    assert sorted([*text.order.tolist(), *text.other_order.tolist()]) == list(range(100))
    assert text.other_tokens(60, 10) == text.other_order[60:].tolist()
    with pytest.raises(ValueError, match=r"^other_tokens: start \+ count is 71, expected at most 70$"):
        text.other_tokens(60, 11)
    assert not len(SyntheticText.of(30, 30).other_order)
    config, text = shape_config("tiny"), tiny_text()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = synthetic_causal_lm(config, text, device=device, dtype=dtype)
    engine = Engine(target, max_len=256, num_slots=2, device=device, dtype=dtype)
    prompts = [text.other_tokens(3, 10), text.tokens(3, 10)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=60))
    assert outputs[0].tokens == text.other_tokens(13, 60) and outputs[1].tokens == text.tokens(13, 60)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_configs_of_their_own(shape: str) -> None:
    config = shape_config(shape)
    assert full_attention_of(config).num_attention_heads % config.num_key_value_heads == 0
    assert not config.tie_word_embeddings
    assert draft_vocab_of(config) < config.vocab_size


def test_rounds_of_a_hybrid_with_fewer_layers_draft_with_an_mtp_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "round.json"
    command = [
        "bench",
        "round",
        "--device",
        "cpu",
        "--shape",
        "tiny-hybrid",
        "--layers",
        "4",
        "--batch",
        "2",
        "--quick",
    ]
    assert main([*command, "--algorithm", "mtp_chain", "--accept", "3", "--output", "60", "--json", str(record)]) == 0
    [result] = json.loads(record.read_text())["results"]
    facts = result["facts"]
    assert (result["params"]["shape"], result["params"]["num_steps"]) == ("tiny-hybrid:4", 3)
    assert facts["accept_length"] == pytest.approx(3, abs=0.1)
    # Three layers read and write 4 matrices of 32 x 32 and 3 inputs of 256 channels; records are of two rounds.
    state, scratch = 4 * (4 * 32 * 32 + 3 * 256), 2 * 4 * (4 * (2 * 32 + 4 * 32 + 4) + 4 * 256)
    assert facts["state_bytes"] == 3 * 2 * 2 * state
    assert facts["scratch_share"] == pytest.approx(scratch / (4 * state), abs=1e-4)
    assert facts["weight_bytes"] + facts["kv_bytes"] + facts["state_bytes"] == result["bytes"]
    assert "scratch / copies of states" in capsys.readouterr().out


@pytest.mark.parametrize(("shape", "kv_layers", "mib"), [("qwen3.5-27b", 16, 147), ("qwen3-next-80b-a3b:12", 3, 18)])
def test_hybrid_shapes_have_the_states_of_the_model(shape: str, kv_layers: int, mib: int) -> None:
    family = family_of(shape_config(shape))
    states = sum(spec.nbytes for spec in family.state_specs(torch.bfloat16))
    assert family.num_kv_layers == kv_layers and states / 2**20 == pytest.approx(mib, abs=0.5)


@pytest.mark.exhaustive
def test_rounds_of_a_latent_shape_count_its_rows_and_experts(tmp_path: Path) -> None:
    record = tmp_path / "round.json"
    command = [
        "bench",
        "round",
        "--device",
        "cpu",
        "--shape",
        "tiny-latent",
        "--layers",
        "3",
        "--batch",
        "2",
        "--quick",
    ]
    assert main([*command, "--algorithm", "none,mtp_chain", "--output", "60", "--json", str(record)]) == 0
    plain, chain = json.loads(record.read_text())["results"]
    rows, each = 2 * (32 + 60 // 2), (64 + 32) * 4
    assert plain["facts"]["kv_bytes"] == rows * 3 * each
    assert chain["facts"]["kv_bytes"] == rows * (3 + 3) * each  # two steps and the committed rows, of one layer
    assert chain["facts"]["accept_length"] > 2


@pytest.mark.exhaustive
def test_rounds_of_a_chain_count_its_layers_and_windows(tmp_path: Path) -> None:
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--shape", "tiny-step", "--batch", "2", "--quick"]
    assert main([*command, "--algorithm", "none,mtp_chain", "--output", "60", "--json", str(record)]) == 0
    plain, chain = json.loads(record.read_text())["results"]
    rows, window, each = 32 + 60 // 2, 24, 2 * 2 * 2 * 64 * 4
    assert plain["facts"]["kv_bytes"] == (rows + 3 * window) * each
    # Layers 2 and 3 run in the first step after the root, layer 3 in the second, all of them for committed rows.
    assert chain["facts"]["kv_bytes"] == plain["facts"]["kv_bytes"] + (2 + 1 + 3) * window * each
    hidden, wide, vocab = 128, 256, 2048
    attention = (2 * 4 * 64 + 2 * 2 * 64 + 4) * hidden + 2 * 64
    layer = attention + 3 * wide * hidden + 2 * hidden * hidden + 5 * hidden
    drafted = (2 + 1 + 3) * layer + 3 * vocab * hidden
    more = chain["facts"]["weight_bytes"] - plain["facts"]["weight_bytes"]
    experts = 8 * 3 * 64 * hidden  # of the target's last layer: more rows choose more of them
    assert 4 * drafted < more <= 4 * (drafted + experts)
    assert chain["facts"]["accept_length"] > 2


def test_rounds_of_a_chain_refuse_more_steps_than_layers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "round", "--device", "cpu", "--shape", "tiny-step", "--algorithm", "mtp_tree"]
    assert main(command) == 2
    assert capsys.readouterr().err.strip() == (
        "specdec bench round: --speculative-num-steps is 4 with mtp_tree, expected at most 3 with --shape tiny-step, "
        "whose MTP layers draft one step each"
    )


def test_synthetic_refuses_module_that_is_no_head() -> None:
    config, text = shape_config("tiny"), tiny_text()
    target = synthetic_causal_lm(config, text, device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        Eagle3(target)
    assert str(error.value) == "Eagle3: head is a Qwen3ForCausalLM, expected a folder, a hub id or an Eagle3Head"


def test_rounds_are_timed_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--shape", "tiny", "--batch", "1,2", "--quick"]
    assert (
        main([*command, "--algorithm", "none,chain", "--accept", "3.5", "--output", "120", "--json", str(record)]) == 0
    )
    assert "chain (5, 1, 6)" in capsys.readouterr().out
    results = json.loads(record.read_text())["results"]
    assert [(r["params"]["algorithm"], r["params"]["batch"]) for r in results] == [
        ("none", 1),
        ("none", 2),
        ("chain", 1),
        ("chain", 2),
    ]
    for r in results:
        assert r["op"] == "round" and r["error"] is None and r["time_us"] > 0 < r["floor_us"]
        expected = 1 if r["params"]["algorithm"] == "none" else 3.5
        assert r["facts"]["accept_length"] == pytest.approx(expected, abs=0.35)


def test_rounds_of_published_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests differ: eight of them are measured at batch 1, and their tenths stand beside the mean."""
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm", "chain", "--output", "40"]
    acceptance = ["--acceptance", "code", "--drafter", "dspark", "--context-decay", "--max-len", "300"]
    assert main([*command, *acceptance, "--json", str(record)]) == 0
    (result,) = json.loads(record.read_text())["results"]
    assert result["params"]["accept"] == "code dspark at 52 tokens" and result["params"]["max_len"] == 300
    facts = result["facts"]
    assert 1 <= facts["accept_length_p10"] < facts["accept_length"] < facts["accept_length_p90"] <= 6
    assert f"{facts['accept_length_p10']:.2f} to {facts['accept_length_p90']:.2f}" in capsys.readouterr().out


def test_rounds_of_block_drafters_change_the_text_of_the_target(tmp_path: Path) -> None:
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm", "none,chain,dspark_tree16"]
    assert main([*command, "--acceptance", "chat", "--output", "90", "--json", str(record)]) == 0
    plain, head, tree = json.loads(record.read_text())["results"]
    assert [r["error"] for r in (plain, head, tree)] == [None] * 3
    assert [r["params"]["accept"] for r in (plain, head, tree)] == [1, "chat eagle3", "chat dspark"]
    assert [r["params"].get("block") for r in (plain, head, tree)] == [None, None, 7]
    assert tree["facts"]["accept_length"] > 3.4 > head["facts"]["accept_length"]
    # Five layers with biases, the injection's projections, and the LM head for the block.
    hidden, query, kv, wide = 128, 4 * 64, 2 * 64, 256
    injected = 5 * 2 * kv * (hidden + 1)
    attention = 2 * query * hidden + 2 * kv * (hidden + 1) + query + hidden + 2 * 64
    layers = 5 * (attention + 3 * wide * hidden + 2 * hidden)
    drafted = layers + injected + 3 * hidden * hidden + 2048 * hidden
    assert tree["facts"]["weight_bytes"] - plain["facts"]["weight_bytes"] == 4 * drafted


@pytest.mark.parametrize("weights", ["fp8", *exhaustive("fp8-rows"), "int4"])
def test_rounds_of_weights_in_fewer_bits(weights: str, tmp_path: Path) -> None:
    """The text is what it was, and so is what drafts bring; the floor counts the bytes that are stored."""
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm", "chain", "--accept", "3.5"]
    results = []
    for options in ([], ["--weights", weights]):
        record = tmp_path / "round.json"
        assert main([*command, "--output", "60", *options, "--json", str(record)]) == 0
        results += json.loads(record.read_text())["results"]
    dense, stored = results
    assert stored["params"] == dense["params"] | {"weights": weights}
    assert stored["facts"]["accept_length"] == pytest.approx(dense["facts"]["accept_length"], abs=0.1)
    assert stored["flops"] == dense["flops"] and stored["bytes"] < dense["bytes"]


def test_rounds_of_draft_weights_in_8_bits_read_half_of_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "round", "--device", "cpu", "--quick", "--output", "30"]
    record = tmp_path / "round.json"
    options = ["none,chain,dspark_chain", "--accept", "3.5", "--draft-weights", "none,fp8,fp8-head"]
    assert main([*command, "--algorithm", *options, "--json", str(record)]) == 0
    plain, *chains = json.loads(record.read_text())["results"]
    target, *sizes = (r["facts"]["weight_bytes"] for r in (plain, *chains))
    for dense, *stored in (chains[:3], chains[3:]):
        for weights, result in zip(("fp8", "fp8-head"), stored, strict=True):
            assert result["params"] == dense["params"] | {"draft_weights": weights}
            assert result["facts"]["accept_length"] == pytest.approx(dense["facts"]["accept_length"], abs=0.2)
    head, own, all_own = (size - target for size in sizes[:3])
    assert own < 0.3 * head and all_own == own  # elements of one byte in place of four, and their scales
    drafter, own, whole = (size - target for size in sizes[3:])
    assert whole < 0.3 * drafter < own  # its LM head is the target's
    assert "draft_weights" not in plain["params"]
    assert main([*command, "--algorithm", "none", "--draft-weights", "fp8"]) == 2
    message = "specdec bench round: --draft-weights is given, expected not with --algorithm none alone\n"
    assert capsys.readouterr().err.endswith(message)


def test_bench_of_a_block_drafter_shares_it_and_ends_after_the_whole_text() -> None:
    setup = rounds.Setup("tiny", rounds.drafting_of("dspark_chain"), EvenAcceptance(3.5), 32, 40, CPU, torch.float32)
    models = rounds.SyntheticModels(setup)
    stored = [replace(setup, draft_weights=weights) for weights in ("fp8-head", None)]
    assert models.draft(stored[0]) is models.draft(stored[1])
    for each in stored:  # in this order: what one engine quantizes is not the other's
        bench = rounds.Bench(each, 2, models)
        assert len(bench.text.order) == 64 and [bench.waves(batch) for batch in (1, 2)] == [2, 1]
        assert bench.generate(2, 0, 40, None) is None
        bench.engine.close()
    head = rounds.Bench(replace(setup, drafting=rounds.drafting_of("chain")), 1)
    assert len(head.text.order) == 1024 and head.waves(1) == rounds.REQUESTS


def test_rounds_of_unions_accept_what_their_model_does(tmp_path: Path) -> None:
    """The n-gram index finds nothing in texts that do not repeat; its nodes come with the model's."""
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--quick", "--accept", "3.5", "--output", "30"]
    names = ["chain", "chain+ngram", "dspark_chain8+ngram"]
    assert main([*command, "--algorithm", ",".join(names), "--json", str(record)]) == 0
    chain, union, block = json.loads(record.read_text())["results"]
    assert [r["params"]["algorithm"] for r in (chain, union, block)] == ["chain", "chain+ngram", "dspark_chain+ngram"]
    assert union["facts"]["accept_length"] == chain["facts"]["accept_length"]
    assert union["facts"]["weight_bytes"] == chain["facts"]["weight_bytes"]
    assert block["facts"]["accept_length"] == pytest.approx(3.5, abs=0.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_rounds_of_two_ranks_read_half_of_the_layers(shape: str, tmp_path: Path) -> None:
    command = ["bench", "round", "--device", "cpu", "--shape", shape, "--quick", "--algorithm", "mtp_chain"]
    command += ["--accept", "2.5", "--output", "60"]
    alone, divided = tmp_path / "alone.json", tmp_path / "divided.json"
    assert main([*command, "--json", str(alone)]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = [*torchrun, "-m", "specdec_kernels", *command, "--tp", "2", "--json", str(divided)]
    done = subprocess.run(ranks, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ms/round") == 1 and "tp=2" in done.stdout
    (one,), (two,) = (json.loads(file.read_text())["results"] for file in (alone, divided))
    assert two["error"] is None and two["params"] == one["params"] | {"tp": 2}
    assert two["facts"]["accept_length"] == pytest.approx(one["facts"]["accept_length"], abs=0.2)
    assert two["facts"]["weight_bytes"] < 0.9 * one["facts"]["weight_bytes"]  # the draft is replicated
    assert two["facts"].get("state_bytes", 0) == one["facts"].get("state_bytes", 0) / 2


def test_bench_round_skips_a_size_too_small_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm", "tree", "--accept", "6", "--output", "4"]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "skipped" in captured.out and "WRONG" not in captured.out
    assert captured.err.startswith("not timed: round shape=tiny algorithm=tree batch=1 ")
    assert captured.err.endswith(
        "no round had all 1 requests: the first ended before the last began, expected a larger --output\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build_tree", "round"], "round is no op, expected it first: specdec bench round"),
        (["round", "--accept", "2", "--drafter", "dspark"], "--accept is 2.0, expected none with --drafter"),
        (
            ["round", "--tp", "2"],
            "--tp is 2, expected one --algorithm and --acceptance, since each rank makes the models",
        ),
        (
            ["round", "--tp", "2", "--algorithm", "none"],
            "--tp is 2, expected torchrun --nproc-per-node 2, since each rank makes the models",
        ),
        (["round", "--max-len", "12"], "--max-len is 12, expected at least 65, the tokens of prompt and output"),
    ],
)
def test_bench_round_refuses_bad_sizes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_rounds_of_a_model_by_transformers_modules(tmp_path: Path) -> None:
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm", "chain", "--accept", "3"]
    assert main([*command, "--output", "41", "--implementation", "transformers", "--json", str(record)]) == 0
    (result,) = json.loads(record.read_text())["results"]
    assert result["params"]["implementation"] == "transformers" and result["error"] is None
    assert result["facts"]["accept_length"] == pytest.approx(3, abs=0.1)


OWN_DRAFTS = '''
import torch
from specdec_kernels import Candidates
from specdec_kernels.engine import Draft, Eagle3, Needs, Ngram, Proposal


class Guess(Draft):
    """Drafts the token after the root by the ids of the text, which its checkpoint names."""

    def __init__(self, path=None, num_nodes=2):
        self.path, self.num_nodes = path, num_nodes

    def needs(self, target):
        return Needs(num_nodes=self.num_nodes, accept_width=2)

    def open(self, context):
        self.following = torch.load(self.path)

    def propose(self, slots, budget):
        tokens = self.following[self.state.root_tokens[slots].long()][:, None]
        parents = torch.full_like(tokens, -1)
        return Proposal(Candidates(tokens, parents, torch.zeros(tokens.shape)))


class Head(Eagle3):
    pass


class Index(Ngram):
    forgotten = 0

    def forget(self):
        Index.forgotten += 1
        super().forget()


def no_draft():
    return "no draft"
'''


@pytest.fixture
def own_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of drafts and a checkpoint for one of them; return the module's name."""
    name = f"own_drafts_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN_DRAFTS)
    order = tiny_text().order
    following = torch.zeros(shape_config("tiny").vocab_size, dtype=torch.int32)
    following[order] = order.roll(-1).int()
    torch.save(following, tmp_path / "following.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def measured(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the results of `specdec bench round` on the CPU."""
    record = tmp_path / "round.json"
    command = ["bench", "round", "--device", "cpu", "--quick", "--output", "40"]
    assert main([*command, *arguments, "--json", str(record)]) == 0
    results: list[dict[str, Any]] = json.loads(record.read_text())["results"]
    return results


def test_rounds_of_a_draft_of_ones_own(own_drafts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It drafts one token, which is always right, and is measured once for several acceptances of synthetic drafts."""
    algorithms = f"none,{own_drafts}:Guess"
    results = measured(
        tmp_path,
        "--algorithm",
        algorithms,
        "--acceptance",
        "chat,code",
        "--speculative-draft-model-path",
        "following.pt",
    )
    assert [r["params"]["algorithm"] for r in results] == ["none", f"{own_drafts}:Guess"]
    own = results[1]
    assert (own["params"]["num_steps"], own["params"]["topk"], own["params"]["nodes"]) == (1, 1, 2)
    assert own["params"]["accept"] == "its own" and own["facts"]["accept_length"] == 2.0
    assert own["floor_us"] > 0 and own["facts"]["nodes"] == "2: 100%"
    assert f"{own_drafts}:Guess (1, 1, 2)" in capsys.readouterr().out


def test_rounds_of_a_class_that_inherits_from_eagle3_have_the_synthetic_head(own_drafts: str, tmp_path: Path) -> None:
    options = ["--accept", "3", "--speculative-num-steps", "4", "--speculative-eagle-topk", "1"]
    (own,) = measured(tmp_path, "--speculative-algorithm", f"{own_drafts}:Head", *options)
    assert own["params"] | {"num_steps": 4, "topk": 1, "nodes": 5, "accept": 3.0} == own["params"]
    assert own["facts"]["accept_length"] == pytest.approx(3, abs=0.35)


def test_rounds_of_a_draft_that_learns_begin_without_what_it_learned(own_drafts: str, tmp_path: Path) -> None:
    """The warm-up writes what is measured: with it, the n-gram index would draft all of that."""
    (one, two) = measured(tmp_path, "--algorithm", f"{own_drafts}:Index", "--batch", "1,2")
    assert sys.modules[own_drafts].Index.forgotten == 2  # once for each batch size
    assert one["facts"]["accept_length"] < 2 and two["facts"]["accept_length"] < 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{own}:Yours"],
            "--speculative-algorithm is {own}:Yours, expected module:Class of a Draft (module '{own}' has",
        ),
        (["{own}:no_draft"], "--speculative-algorithm is {own}:no_draft, expected module:Class of a Draft"),
        (["{own}:Guess", "--speculative-num-steps", "3"], "{own}:Guess, which does not take its flags"),
        (["{own}:Head", "--speculative-num-steps", "65"], "Head: num_steps is 65, expected 1 to 64"),
        (
            ["chain", "--speculative-draft-model-path", "x"],
            "-model-path is x, expected none without a class of your own",
        ),
    ],
    ids=["name", "function", "option", "number", "checkpoint"],
)
def test_bench_round_refuses_drafts(
    own_drafts: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "round", "--device", "cpu", "--quick", "--algorithm"]
    assert main([*command, *(argument.format(own=own_drafts) for argument in arguments)]) == 2
    assert message.format(own=own_drafts) in capsys.readouterr().err


def test_what_a_pass_reads_of_experts() -> None:
    """Few rows read the weights of few experts, and each row is multiplied with those that it takes."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    numbers = 2 * 8 * 3 * 16 * 32  # of all experts
    whole = rounds.weights(model)
    for rows, share in ((1, 2 / 8), (2, 1 - (6 / 8) ** 2), (100, 1.0)):
        read = rounds.weights(model, rows)
        assert whole.elements - read.elements == numbers * 6 // 8
        assert (whole.nbytes - read.nbytes) / 4 == pytest.approx(numbers * (1 - share), abs=2)


def test_bench_round_excludes_rounds_during_prefill() -> None:
    """Two requests whose prompts are read one after the other: the first has a round in between."""
    clock = rounds.RoundClock(batch=2)
    running, end = FinishReason.RUNNING, FinishReason.LENGTH
    arrivals = [
        (0.0, 0, 1, running), (1.0, 0, 3, running), (5.0, 1, 1, running),  # the second's first token
        (6.0, 0, 2, running), (6.0, 1, 4, running), (7.0, 0, 3, running), (7.0, 1, 5, running),
        (8.5, 0, 1, running), (8.5, 1, 2, running), (9.0, 0, 1, end), (9.0, 1, 2, running),
    ]  # fmt: skip
    for at, index, count, reason in arrivals:
        clock.arrivals.append((at, NewTokens(index, [7] * count, reason)))
    assert clock.full_rounds() == ([1.0, 1.5], [8, 3])
