"""Sampled texts compared with draws from the reference's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
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


def distribution(model: Any, prompt: list[int], sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probabilities of all texts that may follow the prompt."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_new_tokens):
        longer = {}
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        for (text, chance), row in zip(texts.items(), logits, strict=True):
            p = reference.filtered(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            for token in p.nonzero().flatten().tolist():
                longer[(*text, token)] = chance * float(p[token])
        texts = longer
    return texts


def expect_distribution(outputs: list[RequestOutput], want: dict[tuple[int, ...], float]) -> int:
    """Require texts of this distribution by their chi-square, rare ones together; return the degrees of freedom."""
    count, seen = len(outputs), Counter(tuple(output.tokens) for output in outputs)
    assert set(seen) <= set(want) and abs(sum(want.values()) - 1) < 1e-5
    rare = sum(chance for chance in want.values() if chance * count < 5)
    cells = [(seen[text], chance * count) for text, chance in want.items() if chance * count >= 5]
    if rare * count >= 5:
        cells.append((count - sum(n for n, _ in cells), rare * count))
    chi_square = sum((n - expected) ** 2 / expected for n, expected in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, (chi_square, freedom)
    return freedom
