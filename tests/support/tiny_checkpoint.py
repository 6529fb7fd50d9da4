"""The trained tiny model, its held-out prompts, and the comparison of greedy texts."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_kernels.engine import RequestOutput
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.tiny import tiny_model

HELD_OUT = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "heldout.jsonl"

NEAR_TIE = 1e-4  # between the reference's two best logits, float32


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("target"))


@functools.cache
def reference_model() -> Any:
    """Return the target as transformers runs it, in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float32).eval()


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


@dataclass
class Comparison:
    """Compares texts with a reference; near-ties are allowed, printed and counted."""

    model: Any
    near_ties: list[str] = field(default_factory=list)

    def check(self, prompt: list[int], ours: list[int], reference: list[int]) -> None:
        """Compare two texts; `reference` may be padded after its end, `ours` ends where the request ended."""
        assert ours, "nothing was generated"
        if ours == reference[: len(ours)]:
            return
        at = next(i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b)
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + ours[:at]])).logits[0, -1]
        best = logits.topk(2)
        gap = float(best.values[0] - best.values[1])
        assert gap < NEAR_TIE and ours[at] in best.indices.tolist(), (
            f"token {at} is {ours[at]}, expected {reference[at]}; the reference's margin is {gap:.2e}"
        )
        self.near_ties.append(f"token {at}: {ours[at]} for {reference[at]}, margin {gap:.2e}")
        print("near-tie:", self.near_ties[-1])


def accept_length(outputs: list[RequestOutput]) -> float:
    """Return the tokens emitted per round, over all outputs."""
    return 1 + sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)
