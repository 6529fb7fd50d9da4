"""Why answers part, by the token ids of both: the place is known exactly, and can be asked for again.

A request from the exact prefix begins with the text so far, and has one new token. Servers that do not know
`generated_token_ids` get the text so far as a part of the prompt. Where it constrains the next token (JSON, calls),
these are asked the whole request again instead, and biases lead it along the text, each of at most the limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from .answers import Answer, Choice, common_length
from .cases import BEGUN, COMPLETIONS, logprob_fields
from .client import Refused
from .questions import (
    DIFFERENCE,
    EDITS,
    LEAST_LOGPROB,
    MOST_BIAS,
    NEAR_TIE,
    SCALES,
    Cause,
    Question,
    attempt,
    bias_of_draw,
)
from .sides import Side

DROPPED = ("n", "echo", "logprobs", "top_logprobs")
KEPT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
FILTERS = ("top_p", "top_k", "min_p")
CONSTRAINTS = ("response_format", "regex", "grammar")
NUM_TOP = 20
DRAW_SCALES = (1e-3, 0.01, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)  # of the limit, tried as margins of draws
NUM_MOVED, NUM_HALVED = 20, 10  # tokens and steps of a search
MOST_LED = 8  # places at which a request is led by biases
NAME = "token_id:"
EXCLUDED = -1000.0  # at most this: a grammar forbids the token

Scores = Mapping[int, float]
Scored = tuple[list[int], list[dict[int, float]]]  # token ids of an answer, and log-probabilities at each place


class Judging(Protocol):
    """The interface of a judge."""

    ours: Side
    theirs: Side
    limit: float
    usable: set[str]


def cause_by_ids(judge: Judging, question: Question, ours: Choice, theirs: Choice, index: int) -> Cause | None:
    """Return why two choices differ whose token ids are known; None: it cannot be asked for.

    The server's text is also followed beyond the place where it parts: the reference continues it from there with the
    same seed, and must part again only by rounding. So one coincidence does not explain a text with another seed.
    """
    prompt, text, have = ours.prompt_ids, ours.token_ids, theirs.token_ids
    assert text is not None and have is not None
    if prompt is None or theirs.prompt_ids != prompt:
        return None
    num_begun, worst = 0, None
    while True:
        rest = text[num_begun:]
        at = common_length(rest, have)
        if at == len(rest) and (worst is not None or at == len(have)):
            return worst or Cause(DIFFERENCE, "the same tokens are answered otherwise", is_rounding=False)
        if at == min(len(rest), len(have)):
            return Cause(DIFFERENCE, "one text ends where the other goes on after the same tokens", is_rounding=False)
        place = num_begun + at
        cause = cause_at(judge, question, index, prompt, text[:place], (rest[at], have[at]))
        if not cause.is_rounding:
            return cause
        if worst is None or (cause.margin or 0.0) > (worst.margin or 0.0):
            worst = cause
        num_begun = place + 1
        left = len(text) - num_begun
        continued = from_prefix(judge, question, index, prompt, text[:num_begun], left) if left else None
        answer = None if continued is None else attempt(lambda asked=continued: asked.to_theirs(judge.theirs))  # type: ignore[misc]
        if isinstance(answer, Refused) and BEGUN in judge.usable:
            evidence = f"the reference does not go on after {num_begun} tokens of the server's text: {answer}"
            return Cause(DIFFERENCE, evidence, is_rounding=False)
        if not isinstance(answer, Answer) or answer.choices[0].token_ids is None:
            return worst
        assert continued is not None
        have = answer.choices[0].token_ids[len(continued.body.get(BEGUN, ())) :]


def cause_at(
    judge: Judging, question: Question, index: int, prompt: list[int], begun: list[int], tokens: tuple[int, int]
) -> Cause:
    """Return why the server chose the first token, and the reference the second one, after the same text."""
    asked = from_prefix(judge, question, index, prompt, begun, 1)
    head: list[int] = begun if asked is None else []
    asked, index = (whole(question), index) if asked is None else (asked, 0)
    sides = (judge.theirs, judge.ours)
    answers = [scores(judge, side, asked, index) for side in sides]
    known: dict[int, float] = {}  # also of rare tokens, which only the side lists that has drawn them
    for answer in answers:
        if answer is not None and answer[0][: len(head)] == head and len(answer[1]) > len(head):
            known |= answer[1][len(head)]
    if not head and not question.is_greedy:
        for token in set(tokens) - set(known):
            known |= score_of(judge, asked, token)
    found = []
    for side, wanted, answer in zip(sides, tokens, answers, strict=True):
        margin = score_margin(side, asked, head, tokens, answer) if question.is_greedy else None
        if margin is None:
            margin = led_margin(judge, side, asked, index, [*head, wanted], known, answer)
        found.append(math.inf if margin is None else margin)
    largest, names = max(found), f"tokens {tokens[0]} and {tokens[1]} at place {len(begun)} of the text"
    if largest <= judge.limit:
        return Cause(NEAR_TIE, f"margin between {names}", largest)
    which = "reference" if found[0] > judge.limit else "server"
    evidence = f"no margin of the {which} within the limit: {names}"
    return Cause(DIFFERENCE, evidence, None if math.isinf(largest) else largest, is_rounding=False)


def whole(question: Question) -> Question:
    """Return a request as it was, to its end and not as a stream."""
    return replace(question, stream=False, leaves_after=None)


def from_prefix(
    judge: Judging, question: Question, index: int, prompt: list[int], begun: Sequence[int], max_tokens: int
) -> Question | None:
    """Return the request of what follows the text so far; None where that would choose by other logits."""
    body = question.body
    seed = body["seed"] + index % body.get("n", 1)
    if BEGUN not in judge.usable:
        return from_longer_prompt(judge, question, seed, prompt, begun, max_tokens)
    asked: dict[str, Any] = {name: value for name, value in body.items() if name not in DROPPED}
    asked |= {BEGUN: list(begun), "max_tokens": len(begun) + max_tokens, "seed": seed}
    if question.path == COMPLETIONS:
        asked["prompt"] = prompt
    if "min_tokens" in asked:
        asked["min_tokens"] = min(asked["min_tokens"], asked["max_tokens"])
    return Question(question.path, asked, depth=question.depth)


def from_longer_prompt(
    judge: Judging, question: Question, seed: int, prompt: list[int], begun: Sequence[int], max_tokens: int
) -> Question | None:
    """Return a completion whose prompt ends with the text so far; None where that would choose by other logits.

    Penalties of the text so far become biases. They cannot, if they meet another penalty or more tokens follow.
    """
    body = question.body
    constrained = any(name in body for name in CONSTRAINTS) or body.get("tool_choice", "auto") != "auto"
    mixed = "repetition_penalty" in body and any(name in body for name in ("presence_penalty", "frequency_penalty"))
    if constrained or mixed or COMPLETIONS not in judge.usable:
        return None
    asked: dict[str, Any] = {name: body[name] for name in KEPT if name in body}
    asked |= {"prompt": [*prompt, *begun], "max_tokens": max_tokens, "seed": seed}
    bias = {int(token): float(value) for token, value in body.get("logit_bias", {}).items()}
    presence, frequency = body.get("presence_penalty", 0.0), body.get("frequency_penalty", 0.0)
    if max_tokens > 1 and presence:
        return None
    for token, count in Counter(begun).items() if presence or frequency else ():
        bias[token] = bias.get(token, 0.0) - presence - frequency * count
    if frequency and max_tokens > 1:
        asked["frequency_penalty"] = frequency
    if bias:
        asked["logit_bias"] = {str(token): value for token, value in bias.items()}
    if (left := body.get("min_tokens", 0) - len(begun)) > 0:
        asked["min_tokens"] = min(left, max_tokens)
    return Question(COMPLETIONS, asked, depth=question.depth)


def scores(judge: Judging, side: Side, asked: Question, index: int) -> Scored | None:
    """Return the new token ids of an answer and the log-probabilities at each place; None if it has none."""
    if "logprobs" in judge.usable:
        asked = asked.with_fields(**logprob_fields(asked.path, NUM_TOP), return_tokens_as_token_ids=True)
    answer = attempt(lambda: asked.to_ours(side) if side is judge.ours else asked.to_theirs(side))
    if not isinstance(answer, Answer) or index >= len(answer.choices):
        return None
    choice = answer.choices[index]
    ids = (choice.token_ids or [])[len(asked.body.get(BEGUN, ())) :]
    skipped = len(choice.tokens) - len(ids)  # of an echoed prompt
    tops = [
        {int(name.removeprefix(NAME)): v for name, v in token.top.items() if name.startswith(NAME) and v > EXCLUDED}
        for token in choice.tokens[max(skipped, 0) :]
    ]
    return ids, tops


def score_of(judge: Judging, asked: Question, token: int) -> dict[int, float]:
    """Return the reference's log-probability of a token that is not among the likeliest, if it gives it."""
    given = asked.body.get("logit_bias", {})
    bias = given | {str(token): given.get(str(token), 0) + MOST_BIAS}
    found = scores(judge, judge.theirs, asked.with_fields(logit_bias=bias), 0)
    if found is None or not found[1] or token not in found[1][0]:
        return {}
    value = found[1][0][token]
    if judge.theirs.dialect == "specdec":  # its log-probabilities are those after the bias
        value = min(value, -1e-6)
        odds = math.exp(value - MOST_BIAS) / -math.expm1(value)
        value = math.log(odds / (1 + odds))
    return {token: value}


def score_margin(
    side: Side, asked: Question, head: list[int], tokens: tuple[int, int], found: Scored | None
) -> float | None:
    """Return how far the less likely of two tokens is from the likeliest; None: the scores do not show it."""
    if side.dialect != "specdec" and any(name in asked.body for name in EDITS):
        return None
    if found is None or found[0][: len(head)] != head or len(found[1]) <= len(head):
        return None
    top = found[1][len(head)]
    if not all(token in top for token in tokens):
        return None
    return max(top.values()) - min(top[token] for token in tokens)


def led_margin(
    judge: Judging, side: Side, asked: Question, index: int, want: list[int], known: Scores, found: Scored | None
) -> float | None:
    """Return the largest of the least biases that lead a request along a text; None: biases within the limit do not.

    A bias that raises a drawn token is one that moves its probability as far as the limit moves a cumulative
    distribution at most.

    Args:
        judge: asks again.
        side: the server that is led.
        asked: the request.
        index: of the choice.
        want: the text.
        known: log-probabilities of tokens at the last place.
        found: the answer without other biases.
    """
    if "logit_bias" not in judge.usable:
        return None
    given, largest = dict(asked.body.get("logit_bias", {})), 0.0
    for _ in range(MOST_LED):
        if found is None:
            return None
        at = common_length(found[0], want)
        if at == len(want):
            return largest
        if at == len(found[0]):
            return None
        top = found[1][at] if at < len(found[1]) else {}
        if at == len(want) - 1:
            top = {**known, **top}
        led = led_on(judge, side, asked.with_fields(logit_bias=given), index, found[0][at], want[: at + 1], top)
        if led is None:
            return None
        largest = max(largest, led.margin)
        if at == len(want) - 1:
            return largest
        given = given | {str(led.token): given.get(str(led.token), 0) + led.size}
        found = scores(judge, side, asked.with_fields(logit_bias=given), index)
    return None


class Bias(NamedTuple):
    """A bias of a token, and the margin that it stands for."""

    margin: float
    token: int
    size: float


def led_on(
    judge: Judging, side: Side, asked: Question, index: int, chosen: int, want: list[int], top: Scores
) -> Bias | None:
    """Return a bias with which a request goes on along a text; None: there is none."""

    def with_bias(bias: Bias) -> list[int]:
        given = asked.body["logit_bias"]
        changed = given | {str(bias.token): given.get(str(bias.token), 0) + bias.size}
        found = scores(judge, side, asked.with_fields(logit_bias=changed), index)
        return [] if found is None else found[0][: len(want)]

    for bias in biases(judge.limit, asked, want[-1], chosen, top):
        if with_bias(bias) == want:
            return bias
    if asked.is_greedy:
        return None
    # These biases may change the text before the place, and move the ends of the drawn interval less than its width.
    # Others move it as a whole, where tokens are drawn in the order of their ids.
    for token in sorted(top, key=lambda one: -top[one])[:NUM_MOVED]:
        for sign in (1, -1):
            low, high = 0.0, 2 * judge.limit
            for _ in range(NUM_HALVED):
                bias = bias_of(asked, (low + high) / 2, token, sign, top)
                got = with_bias(bias)
                if got == want:
                    return bias
                is_short = (
                    len(got) == len(want) and got[:-1] == want[:-1] and (got[-1] > want[-1]) == (chosen > want[-1])
                )
                if is_short and bias.margin == judge.limit:
                    break
                low, high = (bias.margin, high) if is_short else (low, bias.margin)
    return None


def biases(limit: float, asked: Question, wanted: int, chosen: int, top: Scores) -> list[Bias]:
    """Return biases to try for a token instead of the chosen one, smallest first."""
    ends = ((wanted, 1), (chosen, -1))
    if asked.is_greedy:
        margins = [limit * scale for scale in SCALES]
        return [Bias(margin, token, sign * margin) for margin in margins for token, sign in ends]
    margins = [limit * scale for scale in DRAW_SCALES]
    tried = [bias_of(asked, margin, token, sign, top) for margin in margins for token, sign in ends]
    if any(name in asked.body for name in FILTERS):  # which decide whether another token is kept
        tried += [Bias(limit, token, sign * limit) for token in top for sign in (1, -1)]
    return tried


def bias_of(asked: Question, margin: float, token: int, sign: int, top: Scores) -> Bias:
    """Return the bias that moves a token's probability as far as a margin moves a cumulative distribution."""
    size = bias_of_draw(shift_of_draw(asked, margin), drawn_probability(asked, token, top), sign)
    return Bias(margin, token, sign * size)


def shift_of_draw(asked: Question, margin: float) -> float:
    """Return how far a cumulative distribution moves at most when margins between logits move by `margin`.

    The odds of any set of tokens change by a factor of at most exp(margin / T) then, and its probability by at most
    tanh(margin / 4T).
    """
    return math.tanh(margin / (4 * float(asked.body["temperature"])))


def drawn_probability(asked: Question, token: int, top: Scores) -> float:
    """Return about the probability with which a token is drawn, after temperature and filters."""
    temperature = float(asked.body["temperature"])
    best = max(top.values(), default=0.0)
    weights = {one: math.exp((value - best) / temperature) for one, value in top.items()}
    ranked = sorted(weights.values(), reverse=True)
    total = sum(ranked)
    if temperature == 1:
        total = max(total, math.exp(-best))
    kept = ranked[: asked.body["top_k"]] if asked.body.get("top_k") else ranked
    if "top_p" in asked.body:
        reached, count = 0.0, 0
        while count < len(kept) and reached < asked.body["top_p"] * total:
            reached, count = reached + kept[count], count + 1
        kept = kept[:count]
    if "min_p" in asked.body:
        kept = [weight for weight in kept if weight >= asked.body["min_p"]]
    is_filtered = any(name in asked.body for name in FILTERS)
    own = weights.get(token, math.exp((LEAST_LOGPROB - best) / temperature))
    return min(own / (sum(kept) if is_filtered and kept else total or 1.0), 1.0)
