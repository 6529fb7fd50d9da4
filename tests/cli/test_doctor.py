"""`specdec doctor`: it names each fault that a test puts in, and none if there is none."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from specdec_kernels import cli
from specdec_kernels.cli import doctor_examine, doctor_shifts
from specdec_kernels.cli.doctor_examine import compared
from specdec_kernels.cli.doctor_measure import Acceptance, Recorder, count, measure, record, right_in, write_texts
from specdec_kernels.cli.doctor_shifts import Head, Shift, norm_shifts, rotated_queries
from specdec_kernels.cli.prompts import BUILT_IN, read_prompts
from specdec_kernels.engine import Eagle3, Engine, SamplingParams
from specdec_kernels.models.heads.eagle import EagleHead
from specdec_kernels.models.weights.checkpoint import load_tensors
from specdec_kernels.ops import Tree
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import HELD_OUT, held_out

Capture = pytest.CaptureFixture[str]

NEW_TOKENS = 24
SMALL = ("--max-new-tokens", str(NEW_TOKENS), "--speculative-num-steps", "3")
TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven short held-out prompts of code."""
    file = tmp_path_factory.mktemp("doctor") / "prompts.jsonl"
    lines = (line for line in HELD_OUT.read_text().splitlines() if json.loads(line)["kind"] == "code")
    short = (line for line in lines if len(json.loads(line)["prompt"]) < 400)
    file.write_text("\n".join(itertools.islice(short, 7)))
    return file


@pytest.fixture
def diagnosed(prompts: Path, capsys: Capture) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(model: Path, draft: Path, *options: str) -> tuple[int, dict[str, Any]]:
        arguments = ["--prompts", str(prompts), *SMALL, "--device", "cpu", *options, "--json"]
        code = cli.main(["doctor", str(model), "--speculative-draft-model-path", str(draft), *arguments])
        captured = capsys.readouterr()
        assert code < 2, captured.err
        return code, json.loads(captured.out)

    return run


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configured(folder: Path, file: str = "config.json", **changes: object) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))


def as_healthy(found: dict[str, Any], healthy: float) -> bool:
    """Require that the best change gives the draft the accept length that it has without the fault."""
    best: float = found["shifts"][0]["accept_length"]
    return best == pytest.approx(healthy, rel=0.02)


@pytest.fixture(scope="module")
def healthy(prompts: Path) -> float:
    """Return the accept length of an engine that drafts chains with the unchanged head, on these prompts."""
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    with Engine(TARGET, draft=Recorder((1, 2, 3)), adaptive=False, device="cpu") as engine:
        tokens = [engine.tokenizer(text)["input_ids"] for text in texts]
        recorded = record(engine, tokens, write_texts(engine, tokens, NEW_TOKENS))
        return measure(Eagle3(HEAD, num_steps=3, topk=1), 3, engine.target, recorded).accept_length


def test_doctor_finds_nothing_in_a_healthy_head(diagnosed: Any, healthy: float) -> None:
    code, found = diagnosed(TARGET, HEAD)
    assert code == 0 and found["cause"] is None
    assert found["as_is"]["accept_length"] == healthy
    assert found["verdict"].startswith("No change restores acceptance by more than chance")
    top1 = found["as_is"]["acceptance_by_depth"][0]
    assert found["verdict"].endswith(f"The draft's own top-1 agreement with the target is {top1:.1%}.")
    tried = {shift["input"] for shift in found["shifts"]}
    assert tried == {"feature layers", "position offset", "norm", "template", "vocabulary map"}


def test_doctor_of_a_union_measures_both_parts(diagnosed: Any, healthy: float, capsys: Capture, prompts: Path) -> None:
    """The union's trees hold the chains of both, so it accepts what the better one of both does."""
    code, found = diagnosed(TARGET, HEAD, "--algorithm", "eagle3+ngram")
    assert (code, found["algorithm"], found["cause"]) == (0, "EAGLE3+NGRAM", None)
    assert found["as_is"]["accept_length"] == healthy
    index, union = found["parts"]
    assert [(part["name"], part["num_nodes"]) for part in (index, union)] == [("NGRAM", 4), ("EAGLE3+NGRAM", 7)]
    assert 1 < index["accept_length"] < union["accept_length"] and index["gain"] is None
    gain = union["gain"]
    assert gain["mean"] == pytest.approx(union["accept_length"] - healthy) and gain["low"] <= gain["mean"]
    head, both = (part["acceptance_by_depth"][0] for part in (found["as_is"], union))
    assert both >= max(head, index["acceptance_by_depth"][0])
    assert "The n-gram index adds " in found["verdict"]
    arguments = ["--prompts", str(prompts), *SMALL, "--device", "cpu", "--algorithm", "eagle3+ngram"]
    assert cli.main(["doctor", str(TARGET), "--draft", str(HEAD), *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"NGRAM, 4 nodes: the accept length is {index['accept_length']:.2f}\n" in printed
    assert f"EAGLE3+NGRAM, 7 nodes: the accept length is {union['accept_length']:.2f}: a gain of " in printed


def test_right_in_counts_the_longest_path_that_equals_the_text() -> None:
    """Two trees: one whose right path is not its first, one with a wrong root's child and unused nodes."""
    tokens = torch.tensor([[9, 5, 6, 7, 8, 4], [9, 3, 6, 6, 6, 6]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 2, 3, 1], [-1, 0, 1, 2, 3, 4]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 5]], dtype=torch.int32)
    count = torch.tensor([6, 2], dtype=torch.int32)
    tree = Tree(tokens, parents, 40 + depths, tokens, tokens, tokens.long()[..., None], count)
    assert right_in(tree, torch.tensor([[6, 7, 1], [3, 6, 6]])).tolist() == [2, 1]
    assert right_in(tree, torch.tensor([[1, 7, 1], [6, 6, 6]])).tolist() == [0, 0]
    assert right_in(tree, torch.tensor([[6, 7, 8], [3, 6, 6]])).tolist() == [3, 1]


@pytest.mark.exhaustive
def test_doctor_finds_the_same_with_ranks(diagnosed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone, ranks = diagnosed(TARGET, HEAD), diagnosed(TARGET, HEAD, "--tp", "2")
    assert alone == ranks


def test_doctor_refuses_a_kv_dtype_with_ranks(prompts: Path, capsys: Capture) -> None:
    options = ["--prompts", str(prompts), "--device", "cpu", "--tp", "2", "--kv-cache-dtype", "fp8_e4m3"]
    assert cli.main(["doctor", str(TARGET), "--speculative-draft-model-path", str(HEAD), *options]) == 2
    assert capsys.readouterr().err.strip() == (
        "specdec doctor: --kv-cache-dtype is fp8_e4m3, expected none with --tp 2: the change to 16 bits needs a second "
        "engine"
    )


def test_doctor_finds_wrong_feature_layers(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    """Named by what leaves them where they are read as what enters them: each is one higher."""
    head = copy_of(HEAD, tmp_path / "head")
    configured(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    code, found = diagnosed(TARGET, head)
    assert (code, found["cause"]) == (1, "feature layers")
    assert found["shifts"][0]["change"] == "1, 2, 3 (one lower)" and as_healthy(found, healthy)
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 3]' in found["shifts"][0]["remedy"]


class LateFeatures(Eagle3):
    """A draft that pairs each token with its own state, one too late: drafting has only the state before it."""

    def prefill(self, prefill: Any, features: Tensor | None) -> None:
        assert features is not None
        super().prefill(prefill, torch.cat([features[:, 1:], features[:, -1:]], 1))

    def extend(self, slots: Tensor, committed: Any, proposal: Any, features: Tensor | None) -> None:
        assert features is not None
        super().extend(slots, committed, proposal, torch.cat([features[1:], features[-1:]]))


def test_doctor_finds_a_position_offset(diagnosed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head's tensors hold this: it is between the rows of a draft and those of the target."""
    for module in (doctor_examine, doctor_shifts):
        monkeypatch.setattr(module, "draft_class", lambda algorithm: LateFeatures)
    code, found = diagnosed(TARGET, HEAD)
    assert (code, found["cause"]) == (1, "position offset")
    assert found["shifts"][0]["change"] == "features one token earlier"


@pytest.mark.parametrize("by", [1, -1])
def test_rotated_queries_undo_a_rotation(tmp_path: Path, by: int) -> None:
    """A shift of queries against keys by one position undoes itself, and is another head until then."""
    head = Head(HEAD, "EAGLE3", 5, tmp_path)
    there = rotated_queries(head, by)
    assert there is not None
    (name,) = there
    head.tensors[name] = there[name].float()
    back = rotated_queries(head, -by)
    assert back is not None
    original = load_file(HEAD / "model.safetensors")[name].float()
    assert (back[name] - original).abs().max() < 0.01 * original.abs().max()
    assert (there[name].float() - original).abs().max() > 0.5 * original.abs().max()


def test_doctor_finds_a_wrong_norm(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    """Weights stored less one, as one family of models has them."""
    head = copy_of(HEAD, tmp_path / "head")
    rewritten(head, lambda t: t.update({name: t[name] - 1 for name in t if name.endswith("norm.weight")}))
    code, found = diagnosed(TARGET, head)
    assert (code, found["cause"]) == (1, "norm")
    assert found["shifts"][0]["change"] == "weights were stored less one" and as_healthy(found, healthy)


def test_norm_shifts_find_norms_of_every_name(tmp_path: Path) -> None:
    """A copy has the original's tensors but for the norms, those of each feature layer among them."""
    head = copy_of(HEAD, tmp_path / "head")
    rewritten(head, lambda t: t.update({f"fc_norm.{i}.weight": torch.rand(4) for i in range(2)}))
    (tmp_path / "copies").mkdir()
    shift = next(s for s in norm_shifts(Head(head, "EAGLE3", 5, tmp_path / "copies")) if "less one" in s.change)
    assert shift.draft is not None
    shift.draft()
    (copy,) = (tmp_path / "copies").iterdir()
    before, after = load_file(head / "model.safetensors"), load_tensors(copy)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {name for name in before if "norm" in name} > {"fc_norm.1.weight", "norm.weight"}
    assert all(torch.equal(after[name], before[name] + 1) for name in changed)


def test_doctor_finds_a_wrong_template(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    """A template whose separator the tokenizer knows byte by byte, in an order that the target never saw."""
    target = copy_of(TARGET, tmp_path / "target")
    separator = 4 * unicodedata.lookup("FULLWIDTH VERTICAL LINE")
    template = f"{{% for m in messages %}}{{{{ m['content'] }}}}{separator}{{% endfor %}}"
    configured(target, "tokenizer_config.json", chat_template=template)
    code, found = diagnosed(target, HEAD)
    assert (code, found["cause"]) == (1, "template")
    assert found["shifts"][0]["change"] == "without the chat template" and as_healthy(found, healthy)


def test_doctor_finds_a_refused_vocabulary_map(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    head = copy_of(HEAD, tmp_path / "head")
    rewritten(head, lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))))
    code, found = diagnosed(TARGET, head)
    assert (code, found["cause"], found["as_is"]) == (1, "vocabulary map", None)
    assert found["shifts"][0]["change"] == "d2t as target ids" and as_healthy(found, healthy)
    assert found["refusal"].startswith("EAGLE-3 head: d2t leads to token")


def test_doctor_finds_a_wrong_vocabulary_map(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    head = copy_of(HEAD, tmp_path / "head")
    rewritten(head, lambda t: t.update(d2t=torch.zeros_like(t["d2t"])))
    code, found = diagnosed(TARGET, head)
    assert (code, found["cause"]) == (1, "vocabulary map")
    assert found["shifts"][0]["change"] == "the tokens that t2d marks, in order" and as_healthy(found, healthy)


def test_doctor_finds_wrong_kv_scales(diagnosed: Any, tmp_path: Path, healthy: float) -> None:
    """The checkpoint's scales of 8-bit KV are far too small: most numbers are cut off at the largest there is."""
    target = copy_of(TARGET, tmp_path / "target")
    scales = {f"model.layers.{i}.self_attn.{kind}_scale": torch.tensor(1e-3) for i in range(4) for kind in "kv"}
    rewritten(target, lambda t: t.update(scales))
    code, found = diagnosed(target, HEAD, "--kv-cache-dtype", "fp8_e4m3")
    assert (code, found["cause"]) == (1, "KV dtype")
    changes = {shift["change"] for shift in found["shifts"] if shift["restores"]}
    assert changes >= {"16 or 32 bit", "8 bit with measured scales"}
    (without,) = (shift for shift in found["shifts"] if shift["change"] == "16 or 32 bit")
    assert without["accept_length"] == pytest.approx(healthy, rel=1e-6)


def test_measure_predicts_the_engines_accept_length() -> None:
    """Rounds of a chain begun where the last one ended: those of an engine, one for one."""
    with Engine(TARGET, draft=Recorder((1, 2, 3)), adaptive=False, device="cpu") as engine:
        prompts = held_out("code")[20:26]
        texts = record(engine, prompts, write_texts(engine, prompts, 40))
        found = measure(Eagle3(HEAD, num_steps=4, topk=1), 4, engine.target, texts)
    with Engine(TARGET, draft=Eagle3(HEAD, num_steps=4, topk=1), adaptive=False, device="cpu") as engine:
        for prompt, text, rounds, tokens in zip(prompts, texts, found.rounds, found.tokens, strict=True):
            (output,) = engine.generate(prompt, SamplingParams(tokens + 1))  # the first one is of no round
            assert output.tokens[: len(text.tokens) - len(prompt)] == text.tokens[len(prompt) :][: tokens + 1]
            assert output.stats.rounds == rounds > 5


@pytest.fixture
def standalone(tmp_path: Path) -> Path:
    """Save the target as its own draft, whose tokenizer has the token ids in reverse order."""
    draft = copy_of(TARGET, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = len(vocabulary) - 1
    tokenizer["model"]["vocab"] = {text: last - token for text, token in vocabulary.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = last - added["id"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    rewritten(draft, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].flip(0)}))
    return draft


def test_doctor_finds_a_standalone_with_another_vocabulary(diagnosed: Any, standalone: Path) -> None:
    code, found = diagnosed(TARGET, standalone)
    assert (code, found["algorithm"], found["cause"]) == (1, "STANDALONE", "vocabulary map")
    assert found["shifts"][0]["change"] == "tokens by their text"
    assert found["shifts"][0]["accept_length"] == pytest.approx(4, abs=0.05)  # as if the target drafted for itself


def test_doctor_reports_a_head_that_no_change_restores(diagnosed: Any, tmp_path: Path) -> None:
    """A head that was never trained, with an embedding of its own."""
    config = json.loads((HEAD / "config.json").read_text())
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    tensors = {k: t for k, t in EagleHead(LlamaConfig(**config)).state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, head / "model.safetensors")
    code, found = diagnosed(TARGET, head)
    assert (code, found["algorithm"], found["cause"]) == (0, "EAGLE", None)
    assert found["as_is"]["accept_length"] < 1.2
    assert {shift["input"] for shift in found["shifts"]} == {"position offset", "norm", "template", "embedding"}


@pytest.mark.parametrize("columns", ["80", "200"])
def test_doctor_prints_to_terminal_and_pipe(
    prompts: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """No line is longer than the terminal, and every number stands there whole; a pipe gets plain text."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if columns == "80" else "0")
    options = ["--prompts", str(prompts), "--device", "cpu", "--max-new-tokens", "9", "--speculative-num-steps", "1"]
    assert cli.main(["doctor", str(TARGET), "--speculative-draft-model-path", str(HEAD), *options]) == 0
    out = capsys.readouterr().out
    table = re.sub(r"\033\[[0-9;]*m", "", out).partition("written.")[2].partition("No change")[0]
    assert len(table.splitlines()) > 12 and "gain" in table and "norm_before" in table
    if columns == "80":
        assert max(map(len, table.splitlines())) <= 80
    else:
        assert "\033" not in out
    assert out.rstrip().endswith("%.")


def test_compared_does_not_call_chance_a_cause() -> None:
    """A gain that a few prompts make, and one that all do; a gain that is certain but small."""
    one = Shift("norm", "off", "")
    as_is = Acceptance([10] * 8, [20] * 8, [0], [0])
    by_few = compared(as_is, one, Acceptance([10] * 8, [60, *[20] * 7], [0], [0]), 10)
    by_all = compared(as_is, one, Acceptance([10] * 8, [23, 25, 26, 24, 22, 27, 24, 25], [0], [0]), 10)
    small = compared(as_is, one, Acceptance([50] * 8, [102] * 8, [0], [0]), 10)
    assert (by_few.cause, by_all.cause, small.cause) == (False, True, False)
    assert by_few.gain == pytest.approx(by_all.gain + 0.05) and by_few.low == 0 < by_all.low < by_all.gain < by_all.high
    assert small.low == small.high == pytest.approx(0.04)


def test_count_walks_rounds_and_counts_depths() -> None:
    """Roots 0, 3, 4 and 6 begin rounds; by depth all seven count."""
    acceptance = Acceptance([], [], [0, 0], [0, 0])
    count([2, 0, 1, 0, 1, 2, 2], acceptance)
    assert (acceptance.rounds, acceptance.tokens, acceptance.accept_length) == ([4], [9], 2.25)
    assert (acceptance.reached, acceptance.right) == ([7, 5], [5, 3])
    assert acceptance.by_depth == [5 / 7, 3 / 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative-num-steps", "0"], "--speculative-num-steps is 0, expected at least 1"),
        (["--max-new-tokens", "5"], "--max-new-tokens is 5, expected at least 6"),
        (["--apply-chat-template"], f"--apply-chat-template is set, expected not: the tokenizer of {TARGET} has no template"),
        (["--speculative-algorithm", "STANDALONE"], f"draft model: {HEAD} is an EAGLE-3 head, expected a language model "
         "(Eagle3 drafts with it)"),
    ],
)  # fmt: skip
def test_doctor_refuses_bad_flags(capsys: Capture, arguments: list[str], message: str) -> None:
    assert (
        cli.main(["doctor", str(TARGET), "--speculative-draft-model-path", str(HEAD), "--device", "cpu", *arguments])
        == 2
    )
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"specdec doctor: {message}\n")


def test_doctor_refuses_too_few_prompts(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert cli.main(["doctor", str(TARGET), "--speculative-draft-model-path", str(HEAD), "--prompts", str(file)]) == 2
    expected = f"--prompts {file} has 2 prompts, expected at least 6: fewer say little about chance"
    assert capsys.readouterr().err == f"specdec doctor: {expected}\n"


def test_read_prompts_of_files(tmp_path: Path) -> None:
    text, lines, empty, bad = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt", "d.jsonl"))
    text.write_text("first\nstill first\n\n\nsecond\n")
    messages = [{"role": "user", "content": "hi"}]
    lines.write_text(json.dumps({"prompt": "p"}) + "\n\n" + json.dumps({"messages": messages}))
    empty.write_text("\n\n")
    bad.write_text('{"prompt": "p"}\n[1]\n')
    assert read_prompts(text) == ["first\nstill first", "second"]
    assert read_prompts(lines) == ["p", messages]
    assert read_prompts(None) == [prompt for prompts in BUILT_IN.values() for prompt in prompts]
    with pytest.raises(ValueError, match=f"^--prompts is {empty}, which has none, expected some$"):
        read_prompts(empty)
    with pytest.raises(ValueError, match=f"^{bad}, line 2 is '\\[1\\]', expected an object with prompt or messages$"):
        read_prompts(bad)


def test_doctor_takes_a_class_like_eagle3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads_of_mine.py").write_text(
        "from specdec_kernels.engine import Draft, Eagle3\n\n\nclass Mine(Eagle3):\n    pass\n\n\n"
        "class Other(Draft):\n    pass\n"
    )
    words = ["doctor", str(tiny_model("target")), "--speculative-draft-model-path", str(tiny_model("eagle3"))]
    words += ["--max-new-tokens", "16", "--device", "cpu", "--speculative-algorithm"]
    assert cli.main([*words, "heads_of_mine:Mine"]) in (0, 1)
    assert capsys.readouterr().out.startswith("heads_of_mine:Mine: ")
    assert cli.main([*words, "heads_of_mine:Other"]) == 2
    assert "is heads_of_mine:Other, expected a class like Eagle3" in capsys.readouterr().err
