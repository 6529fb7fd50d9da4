"""Find the smallest request that still differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .judge import Finding, Judge
from .questions import Question

MOST_TRIES = 40
KEPT = ("prompt", "messages", "max_tokens", "temperature", "seed")
LOAD_TRIES = 3


def reproduce(judge: Judge, finding: Finding, shrink: bool = True) -> None:
    """Note in a difference whether it happens again, alone or under load, and the smallest request that shows it."""
    question, suspect = finding.suspect.question, finding.suspect
    fields = {one.field for one in suspect.mismatches}

    def shows(one: Question, neighbors: tuple[int, ...] = (), near_ties: bool = False) -> bool:
        found = {mismatch.field for mismatch in judge.differs(one, neighbors, near_ties=near_ties)}
        return bool(found & fields) or (is_text(found) and is_text(fields))

    if shows(question):
        finding.reproduces, finding.smallest = "alone", question
        if shrink:  # near ties are rare, and margins take several requests
            smallest = shrunk(question, lambda one: shows(one, near_ties=True))
            finding.smallest = smallest if shows(smallest) else shrunk(question, shows)
        return
    neighbors = suspect.neighbors
    if not neighbors or not any(shows(question, neighbors) for _ in range(LOAD_TRIES)):
        finding.reproduces = "not again"
        return
    finding.reproduces, finding.smallest = "under load", question
    size = len(neighbors) if shrink else 1
    while size > 1:  # halves, quarters ... of the neighbors
        size = (size + 1) // 2
        parts = [neighbors[begin : begin + size] for begin in range(0, len(neighbors), size)]
        smaller = next((part for part in parts if any(shows(question, part) for _ in range(LOAD_TRIES))), None)
        if smaller is None:
            break
        neighbors, size = smaller, len(smaller)
    finding.smallest_neighbors = list(neighbors)


def is_text(fields: set[str]) -> bool:
    return bool(fields & {"text", "tool_calls", "reasoning", "tokens", "token_ids", "choices"})


def shrunk(question: Question, shows: Callable[[Question], bool]) -> Question:
    """Return the smallest request found that still differs."""
    tries, found_smaller = 0, True
    while found_smaller and tries < MOST_TRIES:
        found_smaller = False
        for smaller in simpler(question):
            tries += 1
            if shows(smaller):
                question, found_smaller = smaller, True
                break
            if tries >= MOST_TRIES:
                break
    return question


def simpler(question: Question) -> Iterator[Question]:
    """Yield requests with one feature less, or shorter texts, the largest steps first."""
    body = question.body
    if question.leaves_after is not None:
        yield replace(question, leaves_after=None)
    if question.stream:
        yield replace(question, stream=False, leaves_after=None)
    if question.depth is not None:
        yield replace(question, depth=None)
    if "tools" in body:
        yield replace(question, body={key: body[key] for key in body if key not in ("tools", "tool_choice")})
    for name in body:
        if name not in KEPT and name not in ("tools", "tool_choice"):
            dropped = {"logprobs", "top_logprobs"} if name == "logprobs" else {name}
            yield replace(question, body={key: body[key] for key in body if key not in dropped})
    if body["temperature"]:
        yield question.with_fields(temperature=0)
    if body["max_tokens"] > 1:
        yield question.with_fields(max_tokens=body["max_tokens"] // 2)
        yield question.with_fields(max_tokens=body["max_tokens"] - 1)
    if len(body.get("messages", [])) > 1:
        yield question.with_fields(messages=body["messages"][-1:])
    elif "messages" in body:
        for text in shorter(body["messages"][0]["content"]):
            yield question.with_fields(messages=[{"role": "user", "content": text}])
    elif isinstance(body["prompt"], str) or isinstance(body["prompt"][0], int):
        for text in shorter(body["prompt"]):
            yield question.with_fields(prompt=text)
    else:
        for text in body["prompt"]:
            yield question.with_fields(prompt=text)


def shorter(text: object) -> Iterator[object]:
    """Yield the last and the first half of a text or list."""
    assert isinstance(text, str | list)
    if len(text) > 1:
        yield text[len(text) // 2 :]
        yield text[: len(text) // 2]
