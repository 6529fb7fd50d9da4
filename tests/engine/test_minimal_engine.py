"""The engine of examples/minimal_engine.py generates what the package's own engine does."""

from __future__ import annotations

import torch

from specdec_kernels.engine import Eagle3, Engine, SamplingParams
from specdec_kernels.tiny import tiny_model
from support.examples import load_example
from support.tiny_checkpoint import Comparison, held_out, reference_model


def test_minimal_engine_writes_what_the_engine_writes() -> None:
    example = load_example("minimal_engine")
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
