"""`specdec tune`: what it measures, recommends and writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import cli
from specdec_kernels.cli import engine_flags, tune_measure
from specdec_kernels.cli.tune_measure import Measured, Options, Row, of_blocks, of_unions, options_of, timed
from specdec_kernels.engine import Eagle3, Engine, Ngram, SamplingParams, Union
from specdec_kernels.engine.tuning import SCHEMA
from specdec_kernels.models.weights.model_config import config_of
from specdec_kernels.synthetic.block import block_config, save_block_drafter, shapes_of
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

Capture = pytest.CaptureFixture[str]

TARGET, HEAD = str(tiny_model("target")), str(tiny_model("eagle3"))


def row(options: Options, batch: int, speed: float) -> Row:
    return Row(options, batch, speed, 2.0, 10.0)


PLAIN, CHAIN, TREE = Options(0, 1, 1), Options(3, 1, 4), Options(3, 4, 16)


def test_options_of_lists_chains_and_trees_that_can_be_filled() -> None:
    """A tree has more nodes than a chain of its depth, and no more than its branches make."""
    assert options_of([1, 3], [1, 4], [4, 8, 64]) == [
        PLAIN, Options(1, 1, 2), CHAIN, Options(1, 4, 4), Options(3, 4, 8)
    ]  # fmt: skip
    assert Options(3, 4, 37) in options_of([3], [4], [37]) and options_of([3], [4], [38]) == [PLAIN]


def test_of_blocks_lists_chains_up_to_the_depth_and_trees_of_that_depth() -> None:
    assert of_blocks(5, [1, 5, 7], [1, 8], [4, 16]) == [
        PLAIN, Options(1, 1, 2), Options(5, 1, 6), Options(5, 4, 4), Options(5, 16, 16)
    ]  # fmt: skip
    assert of_blocks(3, [7], [1], [16]) == [PLAIN, CHAIN] and of_blocks(3, [7], [4], [16]) == [
        PLAIN,
        Options(3, 16, 16),
    ]


def test_of_unions_gives_chains_the_nodes_to_try() -> None:
    of_model = [PLAIN, Options(1, 1, 2), CHAIN, Options(3, 4, 8)]
    assert of_unions(of_model, [3, 4, 8]) == [
        PLAIN, Options(1, 1, 3), Options(1, 1, 4), Options(1, 1, 8), Options(3, 1, 4), Options(3, 1, 8),
        Options(3, 4, 8),
    ]  # fmt: skip


def test_measured_recommends_by_the_geometric_mean() -> None:
    """Twice as fast counts the same at batch 1 and 32, however many tokens that is."""
    rows = [row(PLAIN, 1, 10), row(CHAIN, 1, 40), row(TREE, 1, 60), row(PLAIN, 32, 1000), row(CHAIN, 32, 900)]
    both = Measured("m", "d", "EAGLE3", [*rows, row(TREE, 32, 500)], True)
    assert both.recommended == CHAIN  # 40 * 900 is more than 60 * 500 and 10 * 1000
    assert both.plain(32) == 1000 and both.batches == [1, 32]
    fastest = both.facts()["fastest_by_batch"]
    assert [(f["batch"], f["options"]["num_nodes"]) for f in fastest] == [(1, 16), (32, 1)]
    assert Measured("m", "d", "EAGLE3", rows, False).recommended == CHAIN  # the tree was not measured at both
    slow = [row(PLAIN, 1, 10), row(CHAIN, 1, 9)]
    assert Measured("m", "d", "EAGLE3", slow, True).facts()["recommended"] is None


def test_timed_measures_the_engines_accept_length() -> None:
    """Two waves of two, in which a prompt repeats."""
    prompts = held_out("code")[:3]
    with Engine(TARGET, draft=Eagle3(HEAD, **CHAIN._asdict()), adaptive=False, num_slots=2, device="cpu") as engine:
        found = timed(engine, CHAIN, 2, prompts, 12)
        outputs = engine.generate([*prompts, prompts[0]], SamplingParams(12, ignore_eos=True))
    rounds = sum(output.stats.rounds for output in outputs)
    assert (found.options, found.batch, found.accept_length) == (CHAIN, 2, 44 / rounds)
    assert found.tokens_per_second > 0 and found.round_ms > 0


SMALL = [
    "--batch",
    "1,2",
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--max-new-tokens",
    "6",
    "--device",
    "cpu",
]


@pytest.fixture
def tuned(tmp_path: Path, capsys: Capture) -> tuple[Path, str]:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tuning.json"
    prompts.write_text("def f(x):\n\nimport os\n")
    options = ["--prompts", str(prompts), "--out", str(out), *SMALL]
    assert cli.main(["tune", TARGET, "--speculative-draft-model-path", HEAD, *options]) == 0
    return out, capsys.readouterr().out


def test_tune_prints_a_table_and_writes_a_file(tuned: tuple[Path, str]) -> None:
    file, shown = tuned
    facts: dict[str, Any] = json.loads(file.read_text())
    assert (facts["schema"], facts["model"], facts["draft"], facts["algorithm"]) == (SCHEMA, TARGET, HEAD, "EAGLE3")
    assert facts["complete"] and len(facts["measured"]) == 4
    assert [(m["options"]["num_nodes"], m["batch"]) for m in facts["measured"]] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert [m["accept_length"] for m in facts["measured"][:2]] == [1, 1]
    for words in ("accept length", "tokens/s, batch 1", "tokens/s, batch 2", "plain #", "2, 1, 3"):
        assert words in shown
    assert shown.count(" *\n") == 2 and "\033" not in shown and max(map(len, shown.splitlines())) <= 120


def test_tuning_file_sets_drafting_of_generate_and_bench(tuned: tuple[Path, str], capsys: Capture) -> None:
    file, _ = tuned
    facts = json.loads(file.read_text())
    facts["recommended"] = {"num_steps": 2, "topk": 1, "num_nodes": 3}
    file.write_text(json.dumps(facts))
    fixed = ["--no-speculative-adaptive", "--max-new-tokens", "9", "--device", "cpu", "--no-compare"]
    assert cli.main(["generate", "import os", "--tuning", str(file), *fixed]) == 0
    out = capsys.readouterr().out
    table = out.partition("green:")[2].partition("tokens ")[2].split()
    rounds, drafted = (int(table[table.index(word) + 2]) for word in ("rounds", "drafted"))
    assert "EAGLE3" in out and drafted == 2 * rounds
    options = ["--algorithm", "chain", "--device", "cpu", "--output", "8", "--quick"]
    assert cli.main(["bench", "round", *options, "--tuning", str(file), "--speculative-num-steps", "1"]) == 0
    assert "chain (1, 1, 3)" in capsys.readouterr().out


def test_tuning_file_sets_the_target_of_serve_and_chat(tuned: tuple[Path, str]) -> None:
    """With its own chat template; other flags override the file."""
    file, _ = tuned
    best = {"num_steps": 2, "topk": 1, "num_nodes": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"recommended": best}))
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    given = ["--device", "cpu", "--tuning", str(file)]
    chosen, template = engine_flags.resolve(parser.parse_args(given))
    assert (chosen.model, chosen.algorithm, template) == (TARGET, "EAGLE3", None)
    other, _ = engine_flags.resolve(parser.parse_args([*given, "--speculative-algorithm", "NGRAM", "another"]))
    assert (other.model, other.algorithm) == ("another", "NGRAM")


def test_tuning_file_without_recommendation_is_plain_decoding(tuned: tuple[Path, str], capsys: Capture) -> None:
    file, _ = tuned
    file.write_text(json.dumps(json.loads(file.read_text()) | {"recommended": None}))
    options = ["--tuning", str(file), "--max-new-tokens", "5", "--device", "cpu"]
    assert cli.main(["generate", "import os", *options]) == 0
    out = capsys.readouterr().out
    assert "plain" in out and "EAGLE3" not in out and "NGRAM" not in out


def test_tune_keeps_measurements_after_an_interrupt(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: Engine, options: Options, batch: int, *rest: object) -> Row:
        if batch == 2:
            raise KeyboardInterrupt
        return row(options, batch, 5.0)

    monkeypatch.setattr(tune_measure, "timed", interrupted)
    out = tmp_path / "tuning.json"
    assert cli.main(["tune", TARGET, "--speculative-draft-model-path", HEAD, *SMALL, "--out", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert not facts["complete"] and [m["batch"] for m in facts["measured"]] == [1]
    assert capsys.readouterr().out.startswith("Not all was measured: interrupted, or out of time (--seconds).")


def test_tuning_file_has_the_recommended_drafts_calibration(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fast(engine: Engine, options: Options, batch: int, prompts: list[list[int]], *rest: object) -> Row:
        engine.generate(prompts, SamplingParams(16, ignore_eos=True))
        return row(options, batch, 5.0 * options.num_nodes)

    monkeypatch.setattr(tune_measure, "timed", fast)
    out = tmp_path / "tuning.json"
    options = [*SMALL, "--speculative-num-steps", "1,2", "--out", str(out)]
    assert cli.main(["tune", TARGET, "--speculative-draft-model-path", HEAD, *options]) == 0
    (entry,) = json.loads(out.read_text())["calibrations"]
    assert (entry["draft"], entry["model"], entry["target"]) == ("Eagle3", "eagle3", "target")
    assert len(entry["table"]) == 2 and [1.0, 0.0] not in entry["table"]
    given: list[Any] = []
    begin = Engine.__init__

    def noted(self: Engine, *arguments: Any, **others: Any) -> None:
        begin(self, *arguments, **others)
        given.append(self.tuning["calibrations"])

    monkeypatch.setattr(Engine, "__init__", noted)
    assert cli.main(["generate", "import os", "--tuning", str(out), "--max-new-tokens", "5", "--device", "cpu"]) == 0
    assert given == [[entry], []]  # with the draft, and without to compare
    head = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", TARGET, "--device", "cpu"]
    capsys.readouterr()
    assert cli.main(["generate", "import os", "--tuning", str(out), *head]) == 2
    assert capsys.readouterr().err == (
        "specdec generate: Engine: tuning has a calibration of Eagle3 (eagle3) for target, "
        "expected one of Standalone (target) for target\n"
    )


def test_tuning_of_an_engine_needs_no_options(tmp_path: Path, capsys: Capture) -> None:
    with Engine(TARGET, draft=Eagle3(HEAD, topk=1), num_slots=1, device="cpu") as engine:
        engine.generate("import os", SamplingParams(16, ignore_eos=True))
        tuning = engine.tuning
    file = tmp_path / "t.json"
    file.write_text(json.dumps(tuning))
    head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", HEAD, "--device", "cpu"]
    options = ["--model-path", TARGET, "--tuning", str(file), "--max-new-tokens", "5", *head]
    assert cli.main(["generate", "import os", *options]) == 0
    assert "EAGLE3" in capsys.readouterr().out


def test_tune_measures_nothing_after_the_time_limit(capsys: Capture, tmp_path: Path) -> None:
    assert cli.main(["tune", TARGET, "--speculative-draft-model-path", HEAD, *SMALL, "--seconds", "0"]) == 1
    assert capsys.readouterr().err == "specdec tune: nothing was measured within --seconds\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "--batch is 1,x, expected integers of at least 1, separated by commas"),
        (
            ["--speculative-eagle-topk", "0"],
            "--speculative-eagle-topk is 0, expected integers of at least 1, separated by commas",
        ),
        (["--out", "/nowhere/t.json"], "--out is /nowhere/t.json, expected a file in an existing folder"),
        (["--out", "/"], "--out is /, expected a file in an existing folder"),
        (["--max-new-tokens", "1"], "--max-new-tokens is 1, expected at least 2"),
    ],
)
def test_tune_refuses_bad_flags(capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["tune", TARGET, "--speculative-draft-model-path", HEAD, *arguments]) == 2
    assert capsys.readouterr().err == f"specdec tune: {message}\n"


def test_tuning_file_of_another_schema_is_refused(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"schema": 0}')
    message = f"--tuning is {file} of schema 0, expected schema 1\n"
    assert cli.main(["generate", "--tuning", str(file)]) == 2
    assert capsys.readouterr().err == f"specdec generate: {message}"
    assert cli.main(["bench", "round", "--device", "cpu", "--tuning", str(file)]) == 2
    assert capsys.readouterr().err == f"specdec bench round: {message}"


def test_ngram_draft_does_not_know_the_texts_of_an_earlier_measurement() -> None:
    prompts = held_out("code")[:4]
    with Engine(TARGET, Ngram(num_nodes=8), device="cpu", max_len=512, num_slots=1, adaptive=False) as engine:
        first, again = (timed(engine, Options(0, 0, 8), 1, prompts, 24).accept_length for _ in range(2))
    assert first == again


def test_tune_measures_chains_and_trees_of_a_block_drafter(capsys: Capture, tmp_path: Path) -> None:
    """Its weights are random, and no draft is right."""
    entries = block_config(config_of(TARGET), "dspark", 4, 1, 1, 16)
    tensors = {name: torch.randn(shape) / 30 for name, shape in shapes_of(entries, "dspark").items()}
    drafter = save_block_drafter(entries, tensors, tmp_path / "drafter")
    (tmp_path / "prompts.txt").write_text("def f(x):")
    out = tmp_path / "tuning.json"
    sizes = ["--speculative-num-steps", "2,7", "--speculative-eagle-topk", "1,4", "--nodes", "8"]
    options = [*SMALL, "--batch", "1", *sizes, "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out)]
    assert cli.main(["tune", TARGET, "--draft", str(drafter), *options]) == 0
    facts = json.loads(out.read_text())
    assert facts["algorithm"] == "DSPARK"
    assert [tuple(m["options"].values()) for m in facts["measured"]] == [PLAIN, (2, 1, 3), (4, 8, 8)]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_tune_measures_a_union_and_its_file_sets_one(kind: str, capsys: Capture, tmp_path: Path) -> None:
    drafter, sizes = HEAD, [(2, 1, 8), (2, 4, 8)]
    if kind == "dspark":
        entries = block_config(config_of(TARGET), "dspark", 4, 1, 1, 16)
        tensors = {name: torch.randn(shape) / 30 for name, shape in shapes_of(entries, "dspark").items()}
        drafter, sizes = str(save_block_drafter(entries, tensors, tmp_path / "drafter")), [(2, 1, 8), (4, 8, 8)]
    (tmp_path / "prompts.txt").write_text("def f(x):")
    out = tmp_path / "tuning.json"
    options = [*SMALL, "--batch", "1", "--speculative-eagle-topk", "1,4", "--nodes", "8", "--out", str(out)]
    options += ["--prompts", str(tmp_path / "prompts.txt"), "--speculative-algorithm", f"{kind}+ngram"]
    assert cli.main(["tune", TARGET, "--draft", drafter, *options]) == 0
    facts = json.loads(out.read_text())
    assert (facts["algorithm"], facts["draft"], facts["complete"]) == (f"{kind.upper()}+NGRAM", drafter, True)
    assert [tuple(m["options"].values()) for m in facts["measured"]] == [PLAIN, *sizes]
    out.write_text(json.dumps(facts | {"recommended": Options(*sizes[0])._asdict()}))
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    chosen, _ = engine_flags.resolve(parser.parse_args(["--device", "cpu", "--tuning", str(out)]))
    union: Any = chosen.draft
    assert chosen.algorithm == facts["algorithm"] and isinstance(union, Union)
    assert (union.num_nodes, union.first.num_nodes, union.first.num_steps, union.first.topk) == (8, 8, 2, 1)
    assert isinstance(union.second, Ngram) and union.second.num_nodes == 8
    capsys.readouterr()
    assert cli.main(["tune", TARGET, *options]) == 2
    missing = {
        "eagle3": "--speculative-draft-model-path is missing, expected a folder or hub id for EAGLE3+NGRAM",
        "dspark": f"DSpark: head is None, expected a folder or hub id: {TARGET} has no folder dspark",
    }
    assert capsys.readouterr().err.endswith(f"specdec tune: {missing[kind]}\n")


def test_tune_measures_the_ngram_draft(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    flags = ["--batch", "1", "--max-new-tokens", "8", "--nodes", "4,8", "--device", "cpu", "--out", str(file)]
    assert cli.main(["tune", TARGET, *flags]) == 0
    facts = json.loads(file.read_text())
    assert (facts["algorithm"], facts["draft"], facts["complete"]) == ("NGRAM", None, True)
    assert [row["options"]["num_nodes"] for row in facts["measured"]] == [1, 4, 8]
    assert (
        cli.main(["generate", "--device", "cpu", "--max-new-tokens", "4", "--no-compare", "--tuning", str(file)]) == 0
    )
    capsys.readouterr()
    for more, message in (
        (["--speculative-algorithm", "EAGLE3"], "is missing, expected a folder or hub id for EAGLE3"),
        (["--speculative-algorithm", "ngram", "--draft", HEAD], f"is {HEAD}, expected none for NGRAM"),
    ):
        assert cli.main(["tune", TARGET, *flags, *more]) == 2
        assert f"--speculative-draft-model-path {message}" in capsys.readouterr().err
