"""The acceptance of synthetic drafts: at even distances, or as published drafters are on texts of a domain.

After each token of the synthetic text, a draft proposes some of the tokens ahead. The next token is right, the others
are wrong. An acceptance gives their logits: a table [text length, candidates], column d - 1 for the token d ahead.

`PublishedAcceptance` is calibrated: a candidate with probability q is right in a share q of cases. It combines:

- Conditional acceptance rates of drafters in three domains: the share of rounds that accept draft k among those that
  reach it. The DSpark paper measured three of them (figure 2: Qwen3-4B, temperature 1, no thinking; the accept lengths
  that follow are those of its table 1 within 0.03). Those of "mtp" are of vLLM's counters, by position: Qwen3.6-27B on
  code of agents (two runs, their mean), Qwen3.8 in a chat, and MTP layers on GSM8K (vLLM's pull request 48892).
- Differences between rounds. Each round has an ease, distributed as the confidence of one drafter's first drafts on one
  data set (the same paper's figure 6: 38 of 100 above 0.95). It is correlated with that of the round before, since
  stretches of a text are easy or hard. Draft k is right with probability sigmoid(logit(ease) + shift_k), where shift_k
  makes the mean over all rounds that reach it the published rate.
- The probability that the best candidate leaves, divided among the others in proportion to 1 / rank.

The text consists of rounds of a chain as long as those tables. Longer and shorter chains, and trees, decode the same
text: chains of 3, 11 and 15 drafts come within 0.2 of what the paper measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .names import DOMAINS as DOMAINS
from .names import DRAFTERS as DRAFTERS

PEAK = 20.0  # logit of an even draft's proposal
CERTAIN = 22.0  # logit of probability 1 in a published draft; other tokens have a few around 0
MOST_CANDIDATES = 16
ELEMENTS_PER_CANDIDATE = 32  # elements of a state; with fewer, candidates of different tokens disturb each other
STEP = 0.5  # between logits of an even draft's wrong candidates, as a fraction of its peak
LARGEST_OTHER = 0.8  # largest probability of another candidate, as a fraction of the best one's
CORRELATION = 0.95  # of a round's ease with the one before: it lasts some twenty rounds

RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "math": {
        "eagle3": (0.811, 0.823, 0.838, 0.844, 0.851, 0.856, 0.850),
        "dflash": (0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828),
        "dspark": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
        "mtp": (0.762, 0.808, 0.832, 0.828, 0.858, 0.850, 0.880),
    },
    "code": {
        "eagle3": (0.771, 0.774, 0.781, 0.791, 0.787, 0.794, 0.784),
        "dflash": (0.865, 0.815, 0.797, 0.801, 0.810, 0.801, 0.777),
        "dspark": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
        "mtp": (0.953, 0.913, 0.933, 0.909, 0.902),
    },
    "chat": {
        "eagle3": (0.534, 0.589, 0.642, 0.678, 0.709, 0.729, 0.733),
        "dflash": (0.718, 0.648, 0.638, 0.661, 0.682, 0.692, 0.688),
        "dspark": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
        "mtp": (0.763, 0.817, 0.737, 0.863),
    },
}
# Histogram of 1000 first drafts' confidence, in twentieths from 0 to 1.
CONFIDENCES = (0, 1, 1, 1, 2, 3, 5, 8, 15, 20, 32, 43, 55, 60, 67, 73, 72, 73, 89, 380)

# Accept lengths of an EAGLE-3 head at contexts of 2000, 4000, ... tokens (speculators, pull request 684).
CONTEXT_STEP = 2000
ACCEPT_LENGTHS_BY_CONTEXT = (2.30, 2.04, 1.86, 1.69, 1.40, 1.29, 1.16, 1.09, 1.09, 1.08)


class Acceptance(Protocol):
    """The acceptance of drafts, as logits of their candidates."""

    @property
    def name(self) -> float | str:
        """The name in records."""

    def logits(self, count: int, room: int) -> Tensor:
        """Return logits [count, K], float64 on the CPU, of the K tokens ahead of each token of a text of `count`.

        K is at most `room`, except that an even acceptance needs a fixed number.
        """


@dataclass(frozen=True)
class EvenAcceptance:
    """Wrong for one token in every `length`, at even distances, so that every round emits `length` tokens.

    Attributes:
        length: tokens of a round; the number of draft steps limits it as well. Infinite: never wrong.
        rank: of the right token among the candidates, where the draft is right; 0 is the best.
        peak: logit of its proposal.
    """

    length: float = math.inf
    rank: int = 0
    peak: float = PEAK

    @property
    def name(self) -> float:
        return self.length

    def logits(self, count: int, room: int) -> Tensor:
        # A round ends at the first wrong draft and the next starts after it: it emits the distance between the two.
        miss = torch.zeros(count, dtype=torch.bool)
        if self.length < math.inf:
            miss[(torch.arange(int(count / self.length)) * self.length).long()] = True
        logits = torch.zeros(count, 2 + self.rank, dtype=torch.float64)
        logits[~miss, 0] = self.peak
        logits[miss, 1] = self.peak  # wrong by one token
        for wrong in range(self.rank):
            logits[~miss, 2 + wrong] = self.peak * (1 + STEP * (self.rank - wrong))
        return logits


@dataclass(frozen=True)
class PublishedAcceptance:
    """Right as often as a published drafter on texts of a domain; see the module's docstring.

    Attributes:
        domain: one of DOMAINS.
        drafter: one of DRAFTERS, for its rates; the synthetic model determines the cost of a draft.
        context: mean number of tokens before the draft. Acceptance falls with it, as measured for a head that was
            trained on short texts. None: it does not.
        seed: of the random numbers.
    """

    domain: str
    drafter: str = "eagle3"
    context: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("domain", self.domain, DOMAINS), ("drafter", self.drafter, DRAFTERS)):
            if value not in known:
                raise ValueError(f"PublishedAcceptance: {name} is {value!r}, expected one of {', '.join(known)}")

    @property
    def name(self) -> str:
        return f"{self.domain} {self.drafter}" + (f" at {self.context} tokens" if self.context is not None else "")

    @property
    def rates(self) -> tuple[float, ...]:
        """Conditional acceptance rates of draft 1, 2, ... of a round."""
        published = RATES[self.domain][self.drafter]
        if self.context is None:
            return published
        kept = drafts_kept(self.context) * (mean_accept_length(published) - 1)
        factor = root(lambda f: mean_accept_length([f * rate for rate in published]) - 1 - kept, 0.0, 1.0)
        return tuple(factor * rate for rate in published)

    def logits(self, count: int, room: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        best, hits = draw_confidence(count, self.rates, generator)
        others = max(1, min(MOST_CANDIDATES, room) - 1)
        shares = 1 / torch.arange(1, others + 1, dtype=torch.float64)
        shares = (1 - best)[:, None] * shares / shares.sum()
        shares = shares.minimum(LARGEST_OTHER * best[:, None])  # no candidate gets the rest
        # Rank of the next token: 0, or sampled from the others' shares; `others` + 1: it is no candidate.
        drawn = torch.rand(count, 1, generator=generator, dtype=torch.float64) * (1 - best)[:, None]
        rank = (drawn >= shares.cumsum(1)).sum(1) + 1
        rank[hits] = 0
        chances = torch.cat([best[:, None], shares, torch.zeros(count, 1, dtype=torch.float64)], 1)
        # The tokens after the next one get the other ranks in a random order.
        order = torch.rand(count, others + 2, generator=generator)
        order[torch.arange(count), rank] = -1
        chances = chances.gather(1, order.argsort(1))
        return torch.where(chances > 0, chances.log() + CERTAIN, 0.0)


def mean_accept_length(rates: Sequence[float]) -> float:
    """Return the mean tokens of a round at these conditional rates: 1 plus the probability of each accepted draft."""
    return 1 + sum(math.prod(rates[: k + 1]) for k in range(len(rates)))


def drafts_kept(context: int) -> float:
    """Return the share of accepted drafts that remains after `context` tokens, by linear interpolation."""
    left = [(length - 1) / (ACCEPT_LENGTHS_BY_CONTEXT[0] - 1) for length in ACCEPT_LENGTHS_BY_CONTEXT]
    at = min(max(context / CONTEXT_STEP - 1, 0.0), len(left) - 1.0)
    before = min(int(at), len(left) - 2)
    return left[before] + (at - before) * (left[before + 1] - left[before])


def draw_confidence(count: int, rates: Sequence[float], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample the probability of the best candidate after each token of a text, and whether it is right: [count] each.

    The text is a sequence of rounds; a round has its accepted drafts and one more token.
    """
    rounds = math.ceil(count / mean_accept_length(rates)) + len(rates)
    while True:  # until the rounds, whose mean length is known, fill the text
        level = ease_of_rounds(rounds, generator)
        # The token after a round whose drafts are all accepted has the probability of its last draft.
        shifts = shifts_of([*rates, rates[-1]])
        sure = torch.sigmoid(level[:, None] + torch.tensor(shifts, dtype=torch.float64))
        hits = torch.zeros_like(sure, dtype=torch.bool)
        order = level.argsort()
        for k in range(len(shifts)):
            reached = order[hits[order, :k].all(1)]
            hits[reached, k] = spread(sure[reached, k], generator)
        accepted = hits[:, : len(rates)].long().cumprod(1).sum(1)
        in_text = torch.arange(len(shifts)) <= accepted[:, None]
        if int(in_text.sum()) >= count:
            return sure[in_text][:count], hits[in_text][:count]
        rounds += len(rates)


def ease_of_rounds(rounds: int, generator: torch.Generator) -> Tensor:
    """Return the logits [rounds] of rounds' ease: distributed as CONFIDENCES, ordered by an autoregressive path."""
    steps = torch.randn(rounds, generator=generator, dtype=torch.float64).tolist()
    path = [steps[0]]
    for step in steps[1:]:
        path.append(CORRELATION * path[-1] + math.sqrt(1 - CORRELATION**2) * step)
    ease = torch.empty(rounds, dtype=torch.float64)
    ease[torch.tensor(path).argsort()] = logits_of_ease(rounds)
    return ease


def logits_of_ease(count: int) -> Tensor:
    """Return `count` equally likely values of the logit of a first draft's confidence, increasing."""
    below = torch.tensor([0, *CONFIDENCES], dtype=torch.float64).cumsum(0) / sum(CONFIDENCES)
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    bin_of = torch.searchsorted(below, at, right=True).clamp(1, len(CONFIDENCES)) - 1
    inside = (at - below[bin_of]) / (below[bin_of + 1] - below[bin_of])
    return torch.logit((bin_of + inside) / len(CONFIDENCES), eps=2e-3)


def shifts_of(rates: Sequence[float]) -> list[float]:
    """Return what to add to a round's ease at draft 1, 2, ..., so that rounds that reach it accept it at `rates`."""
    ease = logits_of_ease(2000)
    reached = torch.ones_like(ease)  # the share of the rounds of an ease
    shifts = []
    for rate in rates:

        def too_many(shift: float, rate: float = rate, reached: Tensor = reached) -> float:
            return float((reached * torch.sigmoid(ease + shift)).sum() / reached.sum()) - rate

        shifts.append(root(too_many, -30.0, 30.0))
        reached = reached * torch.sigmoid(ease + shifts[-1])
    return shifts


def spread(chances: Tensor, generator: torch.Generator) -> Tensor:
    """Sample events with probabilities `chances` [n] by systematic sampling.

    In any stretch, the number of events is the sum of its probabilities, plus or minus one. So a text of a few hundred
    rounds already has the published rates.
    """
    line = chances.cumsum(0) + torch.rand((), generator=generator, dtype=chances.dtype)
    return line.floor() > (line - chances).floor()


def root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function crosses 0, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) > 0:
            high = middle
        else:
            low = middle
    return (low + high) / 2
