"""Sampled texts compared with draws from the reference's distribution."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from specdec_kernels.engine import RequestOutput, SamplingParams
from specdec_kernels.reference import verify as reference
from support.tiny_checkpoint import Comparison, reference_model

NOISE = 1e-4  # roundoff of a probability between float32 logits of different shapes

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def close_draws(prompt: list[int], tokens: list[int], sampling: SamplingParams) -> set[int]:
    """Return the tokens that the target may draw after prompt and tokens if probabilities and draw are off by NOISE."""
    assert sampling.seed is not None
    with torch.inference_mode():
        logits = reference_model()(torch.tensor([prompt + tokens])).logits[0, -1]
    u = reference.uniform(sampling.seed, len(prompt) + len(tokens))
    draws = set()
    slacks = (-NOISE, 0.0, NOISE)
    top_ps = [sampling.top_p + more for more in slacks] if sampling.top_p < 1 else [1.0]
    min_ps = [sampling.min_p * (1 + more) for more in slacks] if sampling.min_p > 0 else [0.0]
    for top_p, min_p in itertools.product(top_ps, min_ps):
        p = reference.filtered(logits, sampling.temperature, sampling.top_k, top_p, min_p)
        low, high = (reference.drawn(p, min(max(u + e, 0.0), 1 - 1e-12)) for e in (-NOISE, NOISE))
        draws |= {token for token in range(low, high + 1) if p[token] > 0}
    return draws


def differing(ours: list[RequestOutput], theirs: list[RequestOutput], each: list[SamplingParams]) -> int:
    """Return the number of differing texts; each must differ first at a draw that is too close to call."""
    count = 0
    for a, b, sampling in zip(ours, theirs, each, strict=True):
        if a.tokens == b.tokens:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
        if sampling.temperature == 0:
            Comparison(reference_model()).check(a.prompt_tokens, a.tokens, b.tokens)
        else:
            draws = close_draws(a.prompt_tokens, a.tokens[:at], sampling)
            assert {a.tokens[at], b.tokens[at]} <= draws, f"token {at} is {a.tokens[at]}, expected one of {draws}"
        count += 1
    return count
