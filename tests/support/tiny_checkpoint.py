"""The trained tiny model, its held-out prompts, and the comparison of greedy texts."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_kernels.cli.near_tie import difference_at, parting
from specdec_kernels.engine import RequestOutput, SamplingParams
from specdec_kernels.engine.grammars import NewMatcher
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.tiny import tiny_model

HELD_OUT = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "heldout.jsonl"

NEAR_TIE = 1e-4  # between the logits of two tokens, float32
GREEDY = SamplingParams()


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("target"))


@functools.cache
def reference_model() -> Any:
    """Return the target as transformers runs it, in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float32).eval()


@functools.cache
def exact_model() -> Any:
    """Return the target as transformers runs it, in float64."""
    return AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float64).eval()


def target_with_features(layers: tuple[int, ...], device: torch.device | str = "cpu") -> CausalLM:
    """Return the target in float32, with pools of 128 rows, that keeps the inputs of these layers as features."""
    options = ModelOptions(
        max_len=64,
        num_pages=8,
        page_size=16,
        dtype=torch.float32,
        device=torch.device(device),
        feature_layers=layers,
    )
    return CausalLM(tiny_model("target"), options)


@functools.cache
def held_out(kind: str) -> list[list[int]]:
    """Return token ids of the held-out prompts of a kind ("code" or "repeat"), in file order."""
    lines = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    return [tokenizer()(line["prompt"])["input_ids"] for line in lines if line["kind"] == kind]


def greedy_by_transformers(
    model: Any, prompts: list[list[int]], max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """Return greedy texts of `model.generate`, with prompts in left-padded batches."""
    texts: list[list[int]] = []
    for begin in range(0, len(prompts), 32):
        batch = prompts[begin : begin + 32]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, **options
            )
        texts += out[:, width:].tolist()
    return texts


@functools.cache
def _texts_of_reference(prompts: tuple[tuple[int, ...], ...], max_new_tokens: int) -> list[list[int]]:
    return greedy_by_transformers(reference_model(), [list(prompt) for prompt in prompts], max_new_tokens)


def reference_texts(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return what `greedy_by_transformers` gives for the reference model, computed once for all tests of a process."""
    return [list(text) for text in _texts_of_reference(tuple(map(tuple, prompts)), max_new_tokens)]


@dataclass
class Comparison:
    """Compares texts with a reference; near-ties are allowed, printed and counted.

    Attributes:
        model: the target as a transformers module.
        roundoff: the largest margin between the logits of two tokens that roundoff can reverse.
        near_ties: one line for each.
    """

    model: Any
    roundoff: float = NEAR_TIE
    near_ties: list[str] = field(default_factory=list)

    def check(
        self,
        prompt: list[int],
        ours: list[int],
        reference: list[int],
        sampling: SamplingParams = GREEDY,
        new_matcher: NewMatcher | None = None,
    ) -> None:
        """Compare two texts; `reference` may be padded after its end, `ours` ends where the request ended."""
        assert ours, "nothing was generated"
        texts = ours, reference[: len(ours)]
        if ours == texts[1]:
            return
        at = parting(texts)
        assert at < len(texts[1]), f"the reference ends before token {at}"
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + ours[:at]])).logits[0, -1]
        found = difference_at(at, logits, prompt, texts, sampling, self.roundoff, new_matcher)
        what = f"token {at} is {ours[at]}, expected {reference[at]}; the margin is {found.margin:.2e}"
        assert found.is_near_tie, f"{what}, where roundoff explains {found.limit:.2e}"
        self.near_ties.append(what)
        print("near-tie:", what)


def accept_length(outputs: list[RequestOutput]) -> float:
    """Return the tokens emitted per round, over all outputs."""
    return 1 + sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)
