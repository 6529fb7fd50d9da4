"""examples/train_head: prompts, and heads that it trains for the tiny target."""

from __future__ import annotations

import importlib
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec_kernels.engine import DSpark, Eagle3, Engine, SamplingParams
from specdec_kernels.engine.drafts import Draft
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out, tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_head"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a script of the example."""
    monkeypatch.syspath_prepend(EXAMPLE)
    return importlib.import_module


def script(name: str, *arguments: object) -> str:
    """Run a script of the example and return what it prints."""
    command = [sys.executable, EXAMPLE / f"{name}.py", *arguments]
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def test_held_out_prompts_are_about_nothing_that_training_prompts_are_about(example: Any) -> None:
    prompts = example("prompts")
    found = [
        *prompts.chats(),
        *prompts.functions(three_files(prompts)),
        *prompts.source_beginnings(three_files(prompts)),
    ]
    assert {prompt.domain for prompt in found} == {"chat", "code", "source"}
    held = {prompt.about for prompt in prompts.chats() if prompts.is_held_out(prompt.about)}
    assert 0 < len(held) < 0.2 * len({prompt.about for prompt in prompts.chats()})
    assert not {prompt.text for prompt in found if prompt.about in held} & {
        prompt.text for prompt in found if prompt.about not in held
    }


def three_files(prompts: Any) -> Any:
    return [file for file, _ in zip(prompts.python_files(), range(3), strict=False)]


def texts(file: Path) -> None:
    """Write three texts of a target in the format of write_text.py, the last one held out."""
    tokens = [np.arange(30) % 7 + 20, np.arange(18) % 5 + 20, np.arange(24) % 7 + 20]
    np.savez(
        file,
        train_tokens=np.concatenate(tokens[:2]),
        train_ends=np.array([30, 48]),
        train_prompts=np.array([10, 4]),
        held_out_tokens=tokens[2],
        held_out_ends=np.array([24]),
        held_out_prompts=np.array([6]),
        held_out_domains=np.array(["code"]),
    )


def test_positions_of_prompts_and_padding_do_not_count(example: Any, tmp_path: Path) -> None:
    texts(tmp_path / "text.npz")
    train = example("train").Texts(tmp_path / "text.npz", "train")
    tokens, counts = train.batch(np.array([0, 1]), torch.device("cpu"))
    assert tokens.shape == (2, 32) and not tokens[1, 18:].any()
    assert counts.nonzero().tolist() == [[0, at] for at in range(10, 29)] + [[1, at] for at in range(4, 17)]


def test_heads_of_one_step_load_in_the_engine_and_keep_its_text(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = example("train")
    texts(tmp_path / "text.npz")
    arguments = [tiny_model("target"), tmp_path / "text.npz", tmp_path, "--max-steps", 1, "--draft-vocab", 64]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    train.main()
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 1 and set(record["accept_length"]) == {"eagle3", "dspark"}
    drafts: list[Draft | None] = [
        None,
        Eagle3(tmp_path / "eagle3", num_steps=2, topk=1),
        DSpark(tmp_path / "dspark", topk=1),
    ]
    params, found = SamplingParams(max_new_tokens=6), []
    for draft in drafts:
        with Engine(tiny_model("target"), draft, device="cpu", dtype=torch.float32, max_len=64, num_slots=1) as engine:
            found.append(engine.generate([list(range(20, 30))], params)[0].tokens)
    assert found[0] == found[1] == found[2]


def arguments_of_evaluation(folder: Path, *more: str) -> list[str]:
    """Write two held-out prompts, and return the arguments of evaluate.py that measure on them."""
    with lzma.open(folder / "prompts.xz", "wt") as file:
        for each in held_out("code")[:2]:
            prompt = {"domain": "code", "split": "held_out", "prompt": tokenizer().decode(each)}
            file.write(json.dumps(prompt) + "\n")
    arguments = [tiny_model("target"), folder / "prompts.xz", folder, folder / "record.json"]
    sizes = ["--new-tokens", "24", "--prompts-limit", "2", "--num-slots", "2", "--device", "cpu"]
    return ["evaluate.py", *map(str, arguments), *sizes, *more]


def test_ways_of_transformers_write_the_engine_s_text_and_their_passes_are_counted(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, names = example("evaluate"), ["plain", "ngram 16", *example("evaluate").TRANSFORMERS]
    for some in names[:1], names[1:]:  # the second call goes on with the record of the first one
        monkeypatch.setattr(sys, "argv", arguments_of_evaluation(tmp_path, "--alone", "2", "--only", *some))
        evaluate.main()
    drafts = json.loads((tmp_path / "record.json").read_text())["drafts"]
    assert list(drafts) == names
    for name in names:
        assert drafts[name]["alone"]["equal_texts"] == drafts[name]["alone"]["texts"] == 2, drafts[name]
    length = {name: drafts[name]["alone"]["accept_length"]["code"] for name in names}
    assert length["plain"] == length["transformers plain"] == 1.0
    assert min(length.values()) == 1.0 < length["ngram 16"]


def test_tokens_a_pass_are_those_of_all_texts_of_a_domain(example: Any) -> None:
    result = example("evaluate").Result([{"domain": "chat"}, {"domain": "code"}, {"domain": "chat"}])
    for tokens, passes in (6, 2), (3, 3), (4, 2):
        result.add([0] * tokens, tokens, passes)
    found = result.record([[0] * 6, [1] * 3, [0] * 4])
    assert found["accept_length"] == {"chat": 2.5, "code": 1.0}
    assert (found["texts"], found["equal_texts"]) == (3, 2) and found["tokens_per_second"] > 0


def test_an_evaluation_refuses_unknown_drafts_and_records_of_other_settings(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example("evaluate").main
    monkeypatch.setattr(sys, "argv", arguments_of_evaluation(tmp_path, "--only", "medusa"))
    with pytest.raises(SystemExit):
        main()
    assert "error: --only: medusa unknown, expected of plain, ngram 16, transformers plain" in capsys.readouterr().err
    (tmp_path / "record.json").write_text(json.dumps({"device": "CPU", "new_tokens": 128, "drafts": {}}))
    monkeypatch.setattr(sys, "argv", arguments_of_evaluation(tmp_path))
    with pytest.raises(SystemExit):
        main()
    expected = "was measured with other settings: adaptive, alone, batch, new_tokens, prompts_per_domain"
    assert expected in capsys.readouterr().err


@pytest.mark.exhaustive
def test_trained_heads_accept_as_many_drafts_as_the_trainer_expects(tmp_path: Path) -> None:
    prompts = [
        {"domain": "code", "split": "held_out", "prompt": tokenizer().decode(each)} for each in held_out("code")[:16]
    ]
    prompts += [
        {"domain": "code", "split": "train", "prompt": tokenizer().decode(each)} for each in held_out("code")[16:]
    ]
    with lzma.open(tmp_path / "prompts.xz", "wt") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
    target, prompt_file, text = tiny_model("target"), tmp_path / "prompts.xz", tmp_path / "text.npz"
    once = ["--seconds", 0, "--num-slots", 240]  # all prompts, one greedy text each
    script("write_text", target, prompt_file, text, *once, "--new-tokens", 96, "--held-out-tokens", 64)
    size = ["--draft-vocab", 512, "--intermediate", 384, "--batch-tokens", 1024]
    script("train", target, text, tmp_path, "--seconds", 1e9, "--max-steps", 150, *size)
    options = ["--num-slots", 8, "--new-tokens", 64, "--prompts-limit", 16, "--alone", 0]
    script("evaluate", target, prompt_file, tmp_path, tmp_path / "evaluation.json", *options)
    expected = json.loads((tmp_path / "training.json").read_text())["accept_length"]
    drafts = json.loads((tmp_path / "evaluation.json").read_text())["drafts"]
    for kind, name in ("eagle3", "eagle3 chain 5"), ("dspark", "dspark chain 7"):
        found = drafts[name]["together"]
        # Texts in bfloat16 may part at near ties.
        assert found["texts"] == 16 and found["equal_texts"] >= (13 if torch.cuda.is_available() else 16)
        assert found["accept_length"]["code"] > 1.1
        assert found["accept_length"]["code"] == pytest.approx(
            expected[kind]["code"], rel=0.02
        )  # a text may part at a near tie
        tree = drafts[f"{kind} tree 16"]["together"]["accept_length"]["code"]
        assert tree > found["accept_length"]["code"]
