"""The engine of examples/minimal_engine.py generates what the package's own engine does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.engine import Eagle3, Engine, SamplingParams
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import Comparison, held_out, reference_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minimal_engine.py"


def minimal_engine() -> Any:
    spec = importlib.util.spec_from_file_location("minimal_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minimal_engine_writes_what_the_engine_writes() -> None:
    example = minimal_engine()
    prompts = [*held_out("code")[:5], *held_out("repeat")[:2], [5]]
    assert len(prompts) > example.SLOTS  # some wait for others to end
    ours = example.MinimalEngine(tiny_model("target"), tiny_model("eagle3")).generate(prompts, 40)

    draft = Eagle3(tiny_model("eagle3"), num_steps=example.STEPS, topk=example.TOPK)
    engine = Engine(tiny_model("target"), draft=draft, max_len=example.MAX_LEN, dtype=torch.float32, device="cpu")
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=40))
    comparison = Comparison(reference_model())
    for prompt, tokens, output in zip(prompts, ours, outputs, strict=True):
        comparison.check(prompt, tokens, output.tokens)
        assert len(tokens) == len(output.tokens) or comparison.near_ties
