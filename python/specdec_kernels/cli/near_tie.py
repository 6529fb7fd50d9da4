"""Whether two texts of one request may differ: where roundoff decides between two tokens of the target's.

Rounds of different sizes sum in different orders, so their logits differ by some roundoff, and a token that leads by no
more than that may lose. Any other difference is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..engine import SamplingParams
from ..ops import edit_logits, make_logit_edits
from ..reference.verify import uniform

# By what the logits of two tokens may change places, of the roundoff in the layers behind them.
ROUNDOFF = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Attributes:
        at: the first token that differs, counted from 0.
        margin: between its two candidates: of logits, or, sampled, of what was drawn in [0, 1) and of the nearest
            number that draws the other one.
        limit: the largest margin that roundoff explains.
    """

    at: int
    margin: float
    limit: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= self.limit


def difference(
    model: Any, prompt: list[int], texts: tuple[list[int], list[int]], sampling: SamplingParams
) -> Difference | None:
    """None for two texts of the prompt that are the same.

    `model` is the target as transformers runs it, whose own forward pass gives the logits.
    """
    first, second = texts
    if first == second:
        return None
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    limit = ROUNDOFF[model.dtype]
    if at == min(map(len, texts)):  # one of them ended behind tokens of both
        return Difference(at, math.inf, limit)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + first[:at]], device=model.device)
        logits = model(tokens, logits_to_keep=1).logits[0, -1].float().cpu()
        logits = edited(logits, prompt, first[:at], sampling).double()
    candidates = [first[at], second[at]]
    if sampling.temperature == 0:
        return Difference(at, float(logits.max() - logits[candidates].min()), limit)

    assert sampling.seed is not None
    drawn = uniform(sampling.seed, len(prompt) + at)
    margins = []
    for slack in (-limit, 0, limit):  # by which a filter may keep a token more or less
        p = likeliest(logits, sampling, slack)
        ends = p.cumsum(0)
        margins.append(max(max(float(ends[t] - p[t]) - drawn, drawn - float(ends[t]), 0.0) for t in candidates))
    return Difference(at, min(margins), limit / sampling.temperature / 4)


def edited(logits: Tensor, prompt: list[int], text: list[int], sampling: SamplingParams) -> Tensor:
    """The logits [V] as the request asks for them behind prompt and text."""
    edit = sampling.edits(len(prompt))
    if edit is not None:
        edits = make_logit_edits(1, len(logits), like=logits)
        edit.write(edits, 0, prompt + text)
        root = torch.ones(1, 1, 1, dtype=torch.int64)
        edit_logits(logits.view(1, 1, -1), root, torch.zeros(1, 1, dtype=torch.int32), edits)
    return logits


def likeliest(logits: Tensor, sampling: SamplingParams, slack: float) -> Tensor:
    """The probabilities [V] that a sampled token is drawn from; with `slack`, of filters that are so much wider."""
    p = torch.softmax(logits / sampling.temperature, -1)
    ranked, order = p.sort(descending=True)
    kept = ranked >= (sampling.min_p * (1 - slack)) * ranked[0]
    if sampling.top_k:
        kept[max(sampling.top_k + round(math.copysign(bool(slack), slack)), 1) :] = False
    if sampling.top_p < 1:
        before = ranked.cumsum(0) - ranked
        kept &= before < sampling.top_p * (1 + slack) * ranked[kept].sum()
    p = p.index_fill(0, order[~kept], 0.0)
    return p / p.sum()
