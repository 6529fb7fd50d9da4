"""Answers of a server, whole or joined from a stream, and what differs between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


class Malformed(Exception):
    """A stream that does not follow the protocol."""


@dataclass(frozen=True)
class Token:
    """A token of an answer with log-probabilities.

    Attributes:
        text: its text, or its bytes where they are no text.
        logprob: None where the server gives none, as for the first token of a prompt.
        top: those of the most likely tokens.
    """

    text: str
    logprob: float | None
    top: dict[str, float]


@dataclass
class Choice:
    """A choice of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's, and SGLang's `matched_stop`
    tokens: list[Token] = field(default_factory=list)  # with log-probabilities only
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None

    def said(self) -> str:
        """Return all text of the choice, as it was generated one after the other."""
        return "\0".join([self.reasoning, self.text, *(part for call in self.calls for part in call)])


@dataclass
class Answer:
    """An answer.

    Attributes:
        choices: in the order of their index.
        usage: tokens of the prompt and of the answer.
        is_partial: the client left before the end.
    """

    choices: list[Choice]
    usage: tuple[int, int] | None = None
    is_partial: bool = False


@dataclass(frozen=True)
class Mismatch:
    """A field that differs between two answers.

    Attributes:
        field: its name in the answer, or "refusal" or "error".
        choice: the choice's index, None for the whole answer.
        ours: what the server under test answered.
        theirs: what the reference answered.
    """

    field: str
    choice: int | None
    ours: Any
    theirs: Any

    @property
    def is_of_text(self) -> bool:
        return self.field in ("text", "reasoning", "tool_calls", "tokens", "token_ids")


def parse_whole(value: dict[str, Any]) -> Answer:
    """Read the object of an answer that is no stream."""
    choices = []
    for given in sorted(value["choices"], key=lambda choice: int(choice["index"])):
        choice = Choice()
        choice.prompt_ids = value.get("prompt_token_ids")
        add_part(choice, given, given.get("message") or {"content": given.get("text")})
        choices.append(choice)
    return Answer(choices, usage_of(value))


class StreamParser:
    """Joins the events of a stream."""

    def __init__(self) -> None:
        self.num_events = 0
        self._choices: dict[int, Choice] = {}
        self._usage: tuple[int, int] | None = None
        self._is_done = False

    def push(self, data: str) -> None:
        if self._is_done:
            raise Malformed(f"{data[:60]} comes after {DONE}")
        self.num_events += 1
        if data == DONE:
            self._is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise Malformed(f"the stream ends with {json.dumps(event['error'])[:200]}")
        self._usage = usage_of(event) or self._usage
        for given in event["choices"]:
            choice = self._choices.setdefault(given["index"], Choice())
            choice.prompt_ids = choice.prompt_ids or event.get("prompt_token_ids")
            delta = given.get("delta")
            if choice.finish_reason is not None and (given.get("text") or (delta or {}).get("content")):
                raise Malformed("text comes after the finish reason")
            add_part(choice, given, delta if delta is not None else {"content": given.get("text")})

    def finish(self) -> Answer:
        if not self._is_done:
            raise Malformed(f"the stream ends without {DONE}")
        return self._answer(is_partial=False)

    def partial(self) -> Answer:
        """Return what has come so far."""
        return self._answer(is_partial=not self._is_done)

    def _answer(self, is_partial: bool) -> Answer:
        indices = range(max(self._choices, default=-1) + 1)  # of a partial answer, some have not begun
        return Answer([self._choices.get(index, Choice()) for index in indices], self._usage, is_partial)


def add_part(choice: Choice, given: dict[str, Any], message: dict[str, Any]) -> None:
    """Append a message, or a delta of one, to a choice."""
    choice.text += message.get("content") or ""
    choice.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    for place, call in enumerate(message.get("tool_calls") or []):
        index, function = call.get("index", place), call.get("function") or {}
        while len(choice.calls) <= index:
            choice.calls.append(("", ""))
        name, arguments = choice.calls[index]
        choice.calls[index] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    choice.finish_reason = given.get("finish_reason") or choice.finish_reason
    stopped = given.get("stop_reason", given.get("matched_stop"))
    choice.stop_reason = choice.stop_reason if stopped is None else stopped
    choice.prompt_ids = choice.prompt_ids or given.get("prompt_token_ids")
    if given.get("token_ids") is not None:
        choice.token_ids = (choice.token_ids or []) + given["token_ids"]
    choice.tokens += tokens_of(given.get("logprobs") or {})


def tokens_of(logprobs: dict[str, Any]) -> list[Token]:
    """Return the tokens of `logprobs` of a chat, or of a completion."""
    if logprobs.get("content") is not None:
        return [
            Token(
                name_of(one), finite(one["logprob"]), {name_of(t): t["logprob"] for t in one.get("top_logprobs") or []}
            )
            for one in logprobs["content"]
        ]
    texts = logprobs.get("tokens") or []
    values = logprobs.get("token_logprobs") or [None] * len(texts)
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [Token(text, finite(value), top or {}) for text, value, top in zip(texts, values, tops, strict=True)]


def name_of(token: dict[str, Any]) -> str:
    text: str = token["token"]
    return f"bytes:{bytes(token['bytes']).hex()}" if "\ufffd" in text and token.get("bytes") else text


def finite(value: float | None) -> float | None:
    return None if value is None else max(value, -9999.0)


def usage_of(value: dict[str, Any]) -> tuple[int, int] | None:
    usage = value.get("usage")
    return (usage["prompt_tokens"], usage.get("completion_tokens") or 0) if usage else None


def compare(ours: Answer, theirs: Answer, tolerance: float) -> list[Mismatch]:
    """Return the fields that differ.

    A partial answer must be the beginning of the other. Where texts differ, what follows from them (log-probabilities,
    finish reason, usage) is not listed.
    """
    if len(ours.choices) != len(theirs.choices) and not ours.is_partial:
        return [Mismatch("choices", None, len(ours.choices), len(theirs.choices))]
    found: list[Mismatch] = []
    for index, (one, other) in enumerate(zip(ours.choices, theirs.choices, strict=False)):
        found += compare_choices(index, one, other, tolerance, ours.is_partial)
    if not found and ours.usage and theirs.usage and not ours.is_partial and ours.usage != theirs.usage:
        found.append(Mismatch("usage", None, list(ours.usage), list(theirs.usage)))
    return found


def compare_choices(index: int, ours: Choice, theirs: Choice, tolerance: float, is_partial: bool) -> list[Mismatch]:
    tokens, others = [token.text for token in ours.tokens], [token.text for token in theirs.tokens]
    pairs: list[tuple[str, Any, Any]] = [
        ("prompt_token_ids", ours.prompt_ids, theirs.prompt_ids),
        ("reasoning", ours.reasoning, theirs.reasoning),
        ("text", ours.text, theirs.text),
        ("tool_calls", ours.calls, theirs.calls),
        ("token_ids", ours.token_ids, theirs.token_ids),
        ("tokens", tokens, others),
    ]
    found = []
    for name, one, other in pairs:
        if (name == "tokens" and not (one and other)) or one is None or other is None:
            continue
        same = begins(other, one) if is_partial and name != "prompt_token_ids" else one == other
        if not same:
            found.append(Mismatch(name, index, one, other))
    if found:
        return found
    for name in ("finish_reason", "stop_reason"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other and not (is_partial and one is None):
            found.append(Mismatch(name, index, one, other))
    if tokens and others:
        found += compare_logprobs(index, ours.tokens, theirs.tokens, tolerance)
    return found


def begins(whole: Any, part: Any) -> bool:
    """Return whether a text, a list or a list of calls begins with a part, whose last call may be incomplete."""
    if isinstance(part, list) and part and isinstance(part[-1], tuple):
        begun = len(part) <= len(whole) and list(whole[: len(part) - 1]) == part[:-1]
        return begun and all(other.startswith(one) for one, other in zip(part[-1], whole[len(part) - 1], strict=True))
    return bool(whole[: len(part)] == part)


def compare_logprobs(index: int, ours: Sequence[Token], theirs: Sequence[Token], tolerance: float) -> list[Mismatch]:
    """Return the first log-probability that differs, of the tokens and of the alternatives."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if logprob_distance(one, other) > tolerance:
            shown = [{"token": place, "text": t.text, "logprob": t.logprob, "top": t.top} for t in (one, other)]
            name = "logprobs" if distance(one.logprob, other.logprob) > tolerance else "top_logprobs"
            return [Mismatch(name, index, *shown)]
    return []


def logprob_distance(one: Token, other: Token) -> float:
    """Return the largest distance between log-probabilities of a token and its alternatives.

    An alternative that only one of them lists is at least as unlikely in the other as the last of the other's list. The
    token itself does not count as the last: completions list it even if it is less likely than all alternatives.
    """
    most = distance(one.logprob, other.logprob)
    for top, theirs in ((one.top, other), (other.top, one)):
        least = min((value for text, value in theirs.top.items() if text != theirs.text), default=math.inf)
        for text, value in top.items():
            apart = abs(value - theirs.top[text]) if text in theirs.top else max(value - least, 0.0)
            most = max(most, apart)
    return most


def distance(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of characters or tokens with which both begin."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
