"""`specdec generate`: what it prints, where, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from specdec_kernels import FinishReason, cli
from specdec_kernels.cli.generate import DEFAULT_PROMPT, Printer
from specdec_kernels.engine import Engine, NewTokens, Ngram, SamplingParams
from specdec_kernels.engine.text.detokenizer import Detokenizer
from specdec_kernels.tiny import tiny_model
from support.random_checkpoints import save_random_model

Capture = pytest.CaptureFixture[str]


def generate(*arguments: str) -> int:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    return cli.main(["generate", *device, *arguments])


def test_generate_prints_plain_text_into_a_pipe(capsys: Capture) -> None:
    assert generate("--max-new-tokens", "24") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(DEFAULT_PROMPT)
    assert "\033" not in captured.out and captured.err == ""
    for word in ("NGRAM", "plain", "accept length", "NGRAM produced the same tokens"):
        assert word in captured.out


def test_generate_runs_do_not_draft_from_each_other(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated, for its time, a run is the one that is shown: the index does not know its text already."""
    accepted = []
    for most in (1, 4):
        monkeypatch.setattr("specdec_kernels.cli.generate.MAX_RUNS", most)
        monkeypatch.setattr("specdec_kernels.cli.generate.MIN_SECONDS", 1e9)
        assert generate("--max-new-tokens", "60", "--no-speculative-adaptive", "--no-compare") == 0
        accepted.append(capsys.readouterr().out.partition("accept length")[2].split()[1])
    assert accepted[0] == accepted[1]


def test_generate_samples_reproducibly_from_a_seed(capsys: Capture) -> None:
    """Both runs draw with one seed, so their texts are the same; that seed, printed, repeats them."""
    sampled = ["--max-new-tokens", "24", "--temperature", "1.1", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01"]
    assert generate(*sampled) == 0
    first = capsys.readouterr().out
    assert "NGRAM produced the same tokens" in first
    seed = first.partition("sampled with --seed ")[2].split()[0]
    assert generate(*sampled, "--seed", seed, "--no-compare") == 0
    assert capsys.readouterr().out.partition("\n\ngreen:")[0] == first.partition("\n\ngreen:")[0]


def test_generate_writes_a_trace(capsys: Capture, tmp_path: Path) -> None:
    trace = ["--trace", str(tmp_path / "t.json")]
    fixed = ["--no-speculative-adaptive", "--speculative-num-draft-tokens", "6"]
    assert generate(*fixed, *trace, "--no-compare", "--disable-cuda-graph", "--max-new-tokens", "9") == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"turn", "admit", "prefill", "plan", "commands", "launch", "read", "round", "emit"} <= set(names)
    assert {event["args"]["nodes"] for event in events if event["name"] == "round"} == {6}


def test_generate_does_not_break_text_on_a_narrow_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "def f(" + ", ".join(f"argument_{i}" for i in range(20)) + "):\n    return"
    texts = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert generate(prompt, "--max-new-tokens", "24", "--no-compare") == 0
        text, _, table = capsys.readouterr().out.partition("\n\ngreen:")
        texts.append(text)
        assert "accept length" in table and "\N{HORIZONTAL ELLIPSIS}" not in table
    assert texts[0].startswith(prompt) and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "/nowhere"], "Engine: model is /nowhere, expected an existing folder or a hub id"),
        (
            ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "0"],
            "--speculative-num-steps is 0, expected 1 to 64",
        ),
        (
            ["--model-path", str(tiny_model("target")), "--speculative-algorithm", "EAGLE3"],
            "--speculative-draft-model-path is missing, expected a folder or hub id for EAGLE3",
        ),
        (
            ["--speculative-algorithm", "EAGLE3", "--speculative-ngram-corpus", __file__],
            "--speculative-ngram-corpus is given, expected none for EAGLE3",
        ),
        (
            ["--speculative-algorithm", "ngram", "--speculative-draft-model-quantization", "fp8"],
            "--speculative-draft-model-quantization is fp8, expected none for NGRAM",
        ),
        (
            ["--speculative-algorithm", "NGRAM", "--speculative-ngram-corpus", "/nowhere"],
            "--speculative-ngram-corpus is /nowhere, expected a file that can be read (No such file or directory)",
        ),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0, expected at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0, expected a number from 0 (greedy) on"),
        (["--temperature", "1", "--top-p", "0"], "--top-p is 0.0, expected above 0 and at most 1"),
        (["--page-size", "0"], "--page-size is 0, expected at least 1"),
        (["--max-new-tokens", "9" * 20], f"--max-new-tokens is {'9' * 20}, expected at most 2147483647"),
        (["--device", "foo"], "--device is foo, expected cpu or cuda"),
        (
            ["ab\udcff"],
            "generate: prompts[0] has '\\udcff' at character 2, expected text that UTF-8 can encode",
        ),
        ([""], "generate: prompts[0] is empty, expected at least 1 token"),
        (["--device", "meta"], "--device is meta, expected cpu or cuda"),
        (["--mem-fraction-static", "0.5"], "--mem-fraction-static is 0.5, expected None (device is cpu)"),
    ],
)
def test_generate_refuses_in_one_line(capsys: Capture, arguments: list[str], message: str) -> None:
    assert generate(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == f"specdec generate: {message}\n"


def test_draft_of_ngram_indexes_a_corpus(tmp_path: Path) -> None:
    """A corpus with the model's own text makes it accept more."""
    plain = Engine(tiny_model("target"), draft=Ngram(), adaptive=False, max_len=200, device="cpu")
    budget = SamplingParams(max_new_tokens=60)
    (want,) = plain.generate(DEFAULT_PROMPT, budget)
    corpus = tmp_path / "answers.txt"
    assert want.text is not None
    corpus.write_text(DEFAULT_PROMPT + want.text, "utf-8")
    draft = Ngram(corpus=[corpus])
    engine = Engine(tiny_model("target"), draft=draft, adaptive=False, max_len=200, device="cpu")
    (got,) = engine.generate(DEFAULT_PROMPT, budget)
    assert got.tokens == want.tokens
    assert got.stats.accept_length > 2 * want.stats.accept_length


def test_generate_refuses_a_corpus_that_is_no_text(capsys: Capture, tmp_path: Path) -> None:
    corpus = tmp_path / "image"
    corpus.write_bytes(b"\xff\xfe\x00")
    assert generate("--speculative-algorithm", "NGRAM", "--speculative-ngram-corpus", str(corpus)) == 2
    message = f"specdec generate: --speculative-ngram-corpus is {corpus}, expected text in UTF-8\n"
    assert capsys.readouterr().err == message


def test_generate_refuses_a_model_without_a_tokenizer(capsys: Capture, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, "llama")
    capsys.readouterr()
    assert generate("hello", "--model-path", str(folder)) == 2
    assert "expected token ids (the model folder has no tokenizer)" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--foo"], ["--speculative-algorithm", "MAGIC"], ["--dtype", "int8"]])
def test_generate_rejects_wrong_flags(capsys: Capture, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        generate(*flags)
    assert stop.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def test_generate_takes_a_model_and_a_head_without_its_algorithm(capsys: Capture) -> None:
    target, head = str(tiny_model("target")), str(tiny_model("eagle3"))
    assert generate("--max-new-tokens", "8", "--speculative-draft-model-path", head, target, "import os") == 0
    out = capsys.readouterr().out
    assert out.startswith("import os") and "EAGLE3 produced the same tokens" in out
    assert generate("--max-new-tokens", "2", "--no-compare", "--model-path", target, target) == 2
    assert f"--model-path is {target}, expected none with {target}" in capsys.readouterr().err


def test_generate_takes_algorithms_in_lower_case_and_classes(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafts_of_mine.py").write_text(
        "from specdec_kernels.engine import Ngram\n\n\nclass Mine(Ngram):\n    pass\n\n\nnumber = 3\n"
    )
    flags = ["--max-new-tokens", "8", "--no-compare", "--speculative-algorithm"]
    assert generate(*flags, "ngram") == 0
    assert generate(*flags, "drafts_of_mine:Mine", "--speculative-num-draft-tokens", "8") == 0
    assert "drafts_of_mine:Mine" in capsys.readouterr().out
    expected = "expected module:Class of a Draft"
    for name, why in (
        ("drafts_of_mine:Yours", f"{expected} (module 'drafts_of_mine' has no attribute 'Yours')"),
        ("no_such_module:Mine", f"{expected} (No module named 'no_such_module')"),
        ("drafts_of_mine:number", f"{expected}, got a int"),
    ):
        assert generate(*flags, name) == 2
        assert f"--speculative-algorithm is {name}, {why}" in capsys.readouterr().err
    assert generate(*flags, "drafts_of_mine:Mine", "--speculative-num-steps", "3") == 2
    assert "which does not take its flags" in capsys.readouterr().err


def test_generate_compares_with_transformers(capsys: Capture) -> None:
    assert generate("--max-new-tokens", "16", "--compare-transformers") == 0
    out = capsys.readouterr().out
    assert "transformers" in out and "times as fast as transformers' generate." in out


def test_generate_warns_of_a_draft_that_is_never_accepted(capsys: Capture, tmp_path: Path) -> None:
    head = untrained_copy(tiny_model("eagle3"), tmp_path / "head")
    assert generate("--max-new-tokens", "40", "--no-compare", "--speculative-draft-model-path", str(head)) == 0
    assert "EAGLE3 had nothing accepted: an untrained draft" in " ".join(capsys.readouterr().out.split())


def untrained_copy(head: Path, folder: Path) -> Path:
    """Copy a head with random weights."""
    shutil.copytree(head, folder)
    torch.manual_seed(0)
    (file,) = folder.glob("*.safetensors")
    weights = {
        name: torch.randn(weight.shape).to(weight.dtype) if weight.is_floating_point() else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "foo"], "--device is foo, expected cpu or cuda"),
        (["a\udcff"], "prompts[0] has '\\udcff' at character 1, expected text that UTF-8 can encode"),
        (["--max-new-tokens", "9" * 20], f"--max-new-tokens is {'9' * 20}, expected at most 2147483647"),
    ],
)
def test_generate_refuses_by_name(capsys: Capture, arguments: list[str], message: str) -> None:
    assert generate(*arguments) == 2
    assert message in capsys.readouterr().err


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def printed(text: bytes, rounds: list[int]) -> str:
    """Return what a printer prints of a text that arrives in rounds of these sizes."""
    out = io.StringIO()
    printer = Printer(Console(file=out), Detokenizer(Bytes()).decoder([]))
    for size in rounds:
        printer(NewTokens(0, list(text[:size]), FinishReason.RUNNING, rounds=[size]))
        text = text[size:]
    printer.finish()
    return out.getvalue()


@pytest.mark.parametrize("rounds", [[1] * 13, [13], [2, 5, 4, 2], [3, 3, 7]])
def test_printer_joins_characters_split_between_tokens(rounds: list[int]) -> None:
    text = "a€b😀ñ[x]"
    assert len(text.encode()) == sum(rounds) + 1
    assert printed(text.encode(), [*rounds, 1]) == text + "\n\n"


def test_printer_prints_an_incomplete_character_at_the_end() -> None:
    assert printed("a€".encode()[:-1], [1, 1, 1]) == "a\N{REPLACEMENT CHARACTER}\n\n"
