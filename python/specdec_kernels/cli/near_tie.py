"""Check whether rounding explains the difference between two texts of one request.

Rounds of different sizes sum in different orders, so their logits differ by roundoff, and a token that leads by less
may lose. Any other difference is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine, SamplingParams
from ..engine.grammars import Matcher
from ..engine.params import MAX_LOGPROBS
from ..ops import edit_logits, make_logit_edits
from ..reference.verify import uniform

# Largest margin between the logits of two tokens that roundoff in the layers can reverse.
ROUNDOFF = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}


@dataclass(frozen=True)
class Difference:
    """The first difference between two texts.

    Attributes:
        at: index of the first token that differs.
        margin: between its two candidates: difference of logits, or, if sampled, distance from the random number in
            [0, 1) to the nearest one that gives the other token.
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
    """Return the first difference between two texts of a prompt, None if they are equal.

    The logits are those of `model`, the target as a transformers module.
    """
    first, second = texts
    if first == second:
        return None
    at = parting(texts)
    roundoff = ROUNDOFF[model.dtype]
    if at == min(map(len, texts)):  # one of them is a prefix of the other
        return Difference(at, math.inf, roundoff)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + first[:at]], device=model.device)
        logits = model(tokens, logits_to_keep=1).logits[0, -1]
    return difference_at(at, logits, prompt, texts, sampling, roundoff)


def difference_of_ranks(
    engine: Engine, prompt: list[int], texts: tuple[list[int], list[int]], sampling: SamplingParams
) -> Difference | None:
    """Return the first difference between two greedy texts of a prompt, None if they are equal.

    Ranks hold parts of the target, so the engine says the log-probabilities of the most likely tokens. The margin of a
    token that is none of them is infinite.

    Raises:
        ValueError: sampled texts that differ, whose margin takes the probabilities of all tokens.
    """
    first, second = texts
    if first == second:
        return None
    at = parting(texts)
    roundoff = ROUNDOFF[engine.config.dtype]
    if at == min(map(len, texts)):  # one of them is a prefix of the other
        return Difference(at, math.inf, roundoff)
    if sampling.temperature > 0:
        raise ValueError(
            f"sampled texts differ from token {at} on, and ranks with parts of the target cannot tell whether it is a "
            "near-tie, expected --temperature 0 or one rank"
        )
    params = replace(sampling, max_new_tokens=at + 1, generated_token_ids=first[:at], logprobs=MAX_LOGPROBS)
    (output,) = engine.generate([prompt], params)
    assert output.logprobs is not None
    top = dict(output.logprobs[0].top)
    margin = max(top.values()) - min(top.get(text[at], -math.inf) for text in texts)
    return Difference(at, margin, roundoff)


def parting(texts: tuple[list[int], list[int]]) -> int:
    """Return the index of the first token that differs, or the length of the shorter text."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))


def difference_at(
    at: int,
    logits: Tensor,
    prompt: list[int],
    texts: tuple[list[int], list[int]],
    sampling: SamplingParams,
    roundoff: float,
    new_matcher: Callable[[], Matcher] | None = None,
) -> Difference:
    """Return the difference between two texts of a prompt that are equal up to a token.

    Args:
        at: index of that token, which both have.
        logits: the target's [V] there.
        prompt: token ids.
        texts: token ids of both.
        sampling: parameters of both.
        roundoff: the largest margin between the logits of two tokens that roundoff can reverse.
        new_matcher: makes matchers of the constraint in `sampling`, None without one.
    """
    text, candidates = texts[0][:at], [one[at] for one in texts]
    logits = edited(logits.float().cpu(), prompt, text, sampling, new_matcher).double()
    if sampling.temperature == 0:
        return Difference(at, float(logits.max() - logits[candidates].min()), roundoff)

    assert sampling.seed is not None
    drawn = uniform(sampling.seed, len(prompt) + at)
    # A filter may keep one token more or less, or take two near-ties at its edge in the other order.
    kept = [likeliest(logits, sampling, slack) for slack in (-roundoff, 0, roundoff)]
    kept += edge_swapped(logits, sampling, roundoff)
    nearest = [min(distance(p, token, drawn) for p in kept) for token in candidates]
    # A boundary F of the cumulative probabilities moves by at most F (1 - F) <= 1/4 of what the logits move by.
    return Difference(at, max(nearest), roundoff / sampling.temperature / 4)


def edited(
    logits: Tensor,
    prompt: list[int],
    text: list[int],
    sampling: SamplingParams,
    new_matcher: Callable[[], Matcher] | None,
) -> Tensor:
    """Return the logits [V] after the request's edits for prompt and text."""
    edit = sampling.edits(len(prompt), new_matcher)
    if edit is not None:
        edits = make_logit_edits(1, len(logits), like=logits)
        edit.write(edits, 0, prompt + text)
        root = torch.ones(1, 1, 1, dtype=torch.int64)
        allowed = None
        if new_matcher is not None:
            matcher = new_matcher()
            assert all(map(matcher.accept, text)), "the text is none of its grammar"
            allowed = torch.zeros(1, 1, -(-len(logits) // 32), dtype=torch.int32)
            matcher.fill(allowed[0, 0])
        edit_logits(logits.view(1, 1, -1), root, torch.zeros(1, 1, dtype=torch.int32), edits, vocab_mask=allowed)
    return logits


def distance(p: Tensor, token: int, drawn: float) -> float:
    """Return how far a number in [0, 1) is from those that draw the token from p [V]; infinite if none does."""
    end = float(p[: token + 1].sum())
    return max(end - float(p[token]) - drawn, drawn - end, 0.0) if p[token] > 0 else math.inf


def edge_swapped(logits: Tensor, sampling: SamplingParams, roundoff: float) -> list[Tensor]:
    """Return `likeliest` with the last token that a filter keeps and the first that it drops in the other order.

    Empty if roundoff does not reverse the two.
    """
    is_kept = likeliest(logits, sampling, 0) > 0
    if is_kept.all():
        return []
    last = logits.masked_fill(~is_kept, math.inf).argmin()
    first = logits.masked_fill(is_kept, -math.inf).argmax()
    if logits[last] - logits[first] > roundoff:
        return []
    other = logits.clone()
    other[last], other[first] = logits[first], logits[last]
    return [likeliest(other, sampling, 0)]


def likeliest(logits: Tensor, sampling: SamplingParams, slack: float) -> Tensor:
    """Return the probabilities [V] of sampling after the filters; `slack` widens the filters by that fraction."""
    p = torch.softmax(logits / sampling.temperature, -1)
    ranked, order = p.sort(descending=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k:
        kept[max(sampling.top_k + round(math.copysign(bool(slack), slack)), 1) :] = False
    if sampling.top_p < 1:
        before = ranked.cumsum(0) - ranked
        kept &= before < sampling.top_p * (1 + slack) * ranked[kept].sum()
    kept &= ranked >= (sampling.min_p * (1 - slack)) * ranked[0]
    p = p.index_fill(0, order[~kept], 0.0)
    return p / p.sum()
