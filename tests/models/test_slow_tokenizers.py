"""Checkpoints whose tokenizer has no fast file: vocabulary and merges alone, or pure Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specdec_kernels.engine import Draft, Engine, SamplingParams, Standalone
from specdec_kernels.engine.text.detokenizer import LETTERS
from support.tiny_random_models import NATIVE, tiny_model

PROMPT = "the cab"


def merges(folder: Path) -> int:
    """Write vocabulary and merges, as Qwen2 and GPT-2 were first published; return the number of tokens."""
    vocab = {token: i for i, token in enumerate([*LETTERS, "Ġt", "he", "Ġthe", "<|end|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n")
    names: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return len(vocab)


def python(folder: Path) -> int:
    """Write a byte tokenizer that is code of transformers, without a vocabulary file."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}))
    return 384


def words(folder: Path) -> int:
    vocab = {
        token: i for i, token in enumerate(["<unk>", *(c + end for c in "abcdefghijklmnop" for end in ("", "@@"))])
    }
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    names = {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return len(vocab)


KINDS = {"merges": merges, "python": python, "words": words}


def model_of(kind: str, folder: Path) -> str:
    folder = folder / kind
    folder.mkdir()
    tiny_model("llama", **NATIVE | {"vocab_size": KINDS[kind](folder)}).save_pretrained(folder)
    return str(folder)


def text_of(model: str, draft: Draft | None) -> tuple[str, list[int]]:
    with Engine(
        model, draft=draft, max_len=96, device="cpu", dtype=torch.float32, adaptive=False, num_slots=1
    ) as engine:
        output = engine.generate([PROMPT], SamplingParams(max_new_tokens=12, ignore_eos=True))[0]
        assert output.text is not None
        return output.text, list(output.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_text_with_slow_tokenizer(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT)["input_ids"]
    text, tokens = text_of(model, None)
    before, both = (tokenizer.decode(each, skip_special_tokens=True) for each in (prompt, [*prompt, *tokens]))
    assert before + text == both
    with Engine(model, max_len=96, device="cpu", dtype=torch.float32) as engine:
        assert list(engine.generate([prompt], SamplingParams(12, ignore_eos=True))[0].tokens) == tokens


@pytest.mark.parametrize(("target", "draft"), [("merges", "python"), ("python", "merges"), ("words", "python")])
def test_standalone_draft_with_slow_tokenizers(target: str, draft: str, tmp_path: Path) -> None:
    model, small = model_of(target, tmp_path), model_of(draft, tmp_path)
    assert text_of(model, Standalone(small, num_steps=2, topk=2, num_nodes=4)) == text_of(model, None)
