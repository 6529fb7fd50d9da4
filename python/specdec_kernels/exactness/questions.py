"""Requests that are asked again, and what their answers show."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .answers import Answer
from .cases import logprob_fields
from .client import Failed, Refused
from .sides import Side

Object = dict[str, Any]
Outcome = Answer | Refused | Failed
NEAR_TIE, BATCH, STREAM, DIFFERENCE = "near tie", "batch rounding", "stream", "difference"
EDITS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "regex",
    "grammar",
    "tools",
    "min_tokens",
)  # fields that change logits before a token is chosen
SCALES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # of the limit, tried as margins
NUM_TOP = 5
LEAST_LOGPROB = -10.0  # of a token that is not among the most likely
MOST_BIAS = 20.0


@dataclass(frozen=True)
class Question:
    """A request as it was sent.

    Attributes:
        body: in no dialect.
        stream: the server under test streams; the reference does not.
        leaves_after: events after which the client leaves the server under test.
        depth: draft depth that the server under test is asked for.
    """

    path: str
    body: Object
    stream: bool = False
    leaves_after: int | None = None
    depth: Any = None

    def to_ours(self, side: Side) -> Answer:
        """Ask the server under test."""
        return side.ask(self.path, self.body, stream=self.stream, leaves_after=self.leaves_after, depth=self.depth)

    def to_theirs(self, side: Side, stream: bool = False) -> Answer:
        """Ask the reference."""
        return side.ask(self.path, self.body, stream=stream)

    def with_fields(self, **fields: Any) -> Question:
        return replace(self, body=self.body | fields)

    @property
    def scored(self) -> Question:
        """Return the same request with log-probabilities, to its end."""
        return replace(self.with_fields(**logprob_fields(self.path, NUM_TOP)), leaves_after=None)

    @property
    def is_greedy(self) -> bool:
        return not self.body.get("temperature")


@dataclass(frozen=True)
class Cause:
    """Why two texts part: a kind of `Finding`, what decided, the margin, and whether rounding explains it."""

    kind: str
    evidence: str
    margin: float | None = None
    is_rounding: bool = True


def attempt(ask: Callable[[], Answer]) -> Outcome:
    """Return an answer, or why there is none."""
    try:
        return ask()
    except (Refused, Failed) as error:
        return error


def bias_of_draw(shift: float, p: float, sign: int) -> float:
    """Return the bias that moves a token's probability by about `shift`, up or down, at most to 0."""
    if sign > 0:
        return min(math.log1p(shift / max(p, 1e-9)), MOST_BIAS)
    return -math.log1p(-shift / p) if shift < p * (1 - math.exp(-MOST_BIAS)) else MOST_BIAS
