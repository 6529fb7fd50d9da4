"""The two sides of a run: a server under test and a reference, each with its dialect."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from .answers import Answer, Token, distance
from .cases import (
    BEGUN,
    BOTH,
    CHAT,
    COMPLETIONS,
    EXTRAS,
    FEATURES,
    IDS,
    NEEDS_SWITCH,
    Limits,
    logprob_fields,
    make_case,
)
from .client import Endpoint, Failed, Refused
from .material import KINDS, text_of

Object = dict[str, Any]
DIALECTS = ("specdec", "vllm", "sglang", "openai")
OWNERS = {"specdec_kernels": "specdec", "vllm": "vllm", "sglang": "sglang"}
LARGEST_STEP, LEAST_STEP = 2.0**-3, 2.0**-10  # of bfloat16 and float16 logits
STEP_ERROR = 1e-5  # of a distance between log-probabilities in float32
SPELLINGS: dict[str, dict[str, Any]] = {
    "specdec": {"regex": lambda value: {"regex": value}, "grammar": lambda value: {"ebnf": value}},
    "sglang": {"regex": lambda value: {"regex": value}, "grammar": lambda value: {"ebnf": value}},
    "vllm": {
        "regex": lambda value: {"structured_outputs": {"regex": value}},
        "grammar": lambda value: {"structured_outputs": {"grammar": value}},
    },
}


@dataclass(frozen=True)
class Side:
    """A server, its model and the dialect of its fields beyond OpenAI's.

    Attributes:
        gives_ids: answers have token ids, which are always asked for.
    """

    endpoint: Endpoint
    model: str
    dialect: str
    context: int | None = None
    gives_ids: bool = False

    def ask(
        self, path: str, body: Object, *, stream: bool = False, leaves_after: int | None = None, depth: Any = None
    ) -> Answer:
        """Send a body of `cases` in this server's spelling; the errors are those of `Endpoint.ask`."""
        return self.endpoint.ask(path, self.spelled(body, stream, depth), leaves_after)

    def spelled(self, body: Object, stream: bool = False, depth: Any = None) -> Object:
        """Return a body as this server reads it."""
        sent: Object = {"model": self.model}
        for name, value in body.items():
            spelling = SPELLINGS.get(self.dialect, {}).get(name)
            sent |= spelling(value) if spelling else {name: value}
        if self.gives_ids:
            sent[IDS] = True
        if stream:
            sent |= {"stream": True, "stream_options": {"include_usage": True}}
        if depth is not None and self.dialect == "specdec":
            sent["speculation"] = depth
        return sent

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its text, None if the server does not say."""
        try:
            answer = self.endpoint.get("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        except (Refused, Failed):
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens[0] if tokens and len(tokens) == 1 else None


def open_side(endpoint: Endpoint, model: str | None, dialect: str) -> Side:
    """Ask a server for its model, dialect and context length.

    Raises:
        Unreachable: it does not accept connections.
        ValueError: it has no models, or not this one.
    """
    try:
        known = endpoint.get("/v1/models")["data"]
    except (Refused, Failed) as error:
        raise ValueError(f"{endpoint.url}/v1/models answered {error}, expected a list of models") from error
    entry = next((one for one in known if model in (None, one["id"])), None)
    if entry is None:
        names = ", ".join(one["id"] for one in known) or "none"
        raise ValueError(f"the model of {endpoint.url} is {names}, expected {model or 'one'}")
    found = OWNERS.get(entry.get("owned_by", ""), "openai") if dialect == "auto" else dialect
    return Side(endpoint, entry["id"], found, entry.get("max_model_len"))


@dataclass
class Probe:
    """The capabilities of both servers, and how much they round.

    Attributes:
        usable: features and endpoints that both accept.
        skipped: features that both refuse, and seeded sampling where 16-bit logits decide draws, and why.
        one_sided: features that only one of them refuses: (feature, which one, why).
        has_ids: both return token ids.
        step: of 16-bit logits, if the reference's have one.
        noise: largest distance between log-probabilities of the reference alone and under load, if it gives any.
    """

    limits: Limits
    usable: set[str]
    skipped: dict[str, str] = field(default_factory=dict)
    one_sided: list[tuple[str, str, str]] = field(default_factory=list)
    has_ids: bool = False
    step: float | None = None
    noise: float | None = None


def refusal(side: Side, path: str, body: Object, stream: bool = False) -> str | None:
    """Return why a server refuses a body, None if it answers."""
    try:
        side.ask(path, body, stream=stream)
    except (Refused, Failed) as error:
        return str(error)
    return None


def probe(ours: Side, theirs: Side, limits: Limits, wanted: Sequence[str], concurrency: int = 8) -> Probe:
    """Find out what both servers know.

    Raises:
        ValueError: they share no endpoint.
    """
    found = Probe(limits, set())

    def refused_by(side: Side, name: str) -> str | None:
        """Return why a server refuses a feature on one of the endpoints, None if it answers."""
        paths = [path for path in FEATURES[name].paths if path in found.usable] if name in FEATURES else [name]
        for path in paths:
            drawn = FEATURES[name].fields(random.Random(0)) if name in FEATURES else {}
            why = refusal(side, path, small_body(path) | drawn | extra_body(name, path), name == "stream")
            if why is not None:
                return why
        return None if paths else "it needs an endpoint that is refused"

    def ask(names: Sequence[str]) -> None:
        asks = [(side, name) for name in names for side in (ours, theirs)]
        with ThreadPoolExecutor(concurrency) as clients:
            answers = list(clients.map(lambda one: refused_by(*one), asks))
        for name, by_ours, by_theirs in zip(names, answers[::2], answers[1::2], strict=True):
            if by_ours and by_theirs:
                found.skipped[name] = by_theirs
            elif by_ours:
                found.one_sided.append((name, "server", by_ours))
            elif by_theirs:
                found.one_sided.append((name, "reference", by_theirs))
            else:
                found.usable.add(name)

    ask(BOTH)
    if not found.usable:
        raise ValueError(f"both servers refuse {' and '.join(BOTH)}: {found.skipped}")
    features = [name for name in FEATURES if name in wanted]
    if "openai" in (ours.dialect, theirs.dialect):
        why = "no field of OpenAI's; --dialect says which others the server has"
        found.skipped |= {name: why for name in features if name in EXTRAS}
    if NEEDS_SWITCH in features:
        if ours.dialect == "specdec":
            found.usable.add(NEEDS_SWITCH)
        else:
            found.skipped[NEEDS_SWITCH] = "the server has no switch for each request"
    ask([name for name in features if name != NEEDS_SWITCH and name not in found.skipped])
    return found


def returns_ids(side: Side, paths: Sequence[str]) -> bool:
    """Return whether a server returns token ids of prompts and answers; others may ignore the field."""
    for path in paths:
        try:
            choice = side.ask(path, small_body(path) | {IDS: True}).choices[0]
        except (Refused, Failed, IndexError):
            return False
        if not choice.prompt_ids or choice.token_ids is None:
            return False
    return True


def continues_ids(side: Side, paths: Sequence[str]) -> bool:
    """Return whether a server's answers begin with the token ids that a request gives; others may ignore the field."""
    begun = [5, 6, 7]
    for path in paths:
        try:
            choice = side.ask(path, small_body(path) | {BEGUN: begun}).choices[0]
        except (Refused, Failed, IndexError):
            return False
        if choice.token_ids is None or choice.token_ids[: len(begun)] != begun:
            return False
    return True


def small_body(path: str) -> Object:
    body: Object = {"max_tokens": 8, "temperature": 0, "seed": 1}
    return body | ({"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"})


def extra_body(name: str, path: str) -> Object:
    """Return members of features that are not drawn by `Feature.fields`."""
    if name == "logprobs":
        return logprob_fields(path, 5)
    known: dict[str, Object] = {
        "token ids": {"prompt": [5, 6, 7]},
        "several prompts": {"prompt": ["Hi", "Ho"]},
        "prediction": {"prediction": {"type": "content", "content": "Hi"}},
        "multi-turn": {"messages": [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]},
    }
    return known.get(name, {})


def measured_limits(theirs: Side, limits: Limits, path: str) -> Limits:
    """Return limits with the characters of a token in each kind of text, as the reference counts them."""
    found = {}
    for kind in KINDS:
        text = text_of(random.Random(0), kind, min(300, limits.context // 2))
        prompt: Object = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        try:
            usage = theirs.ask(path, small_body(path) | prompt | {"max_tokens": 1}).usage
        except (Refused, Failed):
            usage = None
        found[kind] = round(len(text) / usage[0], 2) if usage and usage[0] else 1.0
    return replace(limits, chars_per_token=found)


def noise_of(alone: Sequence[Answer], loaded: Sequence[Answer]) -> float | None:
    """Return the largest distance between log-probabilities of the same tokens, up to where texts differ."""
    distances = [
        distance(one.logprob, other.logprob)
        for pair in zip(alone, loaded, strict=True)
        for choices in zip(pair[0].choices, pair[1].choices, strict=True)
        for one, other in common(choices[0].tokens, choices[1].tokens)
    ]
    return max(distances, default=None)


def logit_step(answers: Sequence[Answer]) -> float | None:
    """Return the step of 16-bit logits, by the distances of log-probabilities at a token; None for finer ones."""
    distances = [
        abs(one - other)
        for answer in answers
        for choice in answer.choices
        for token in choice.tokens
        for one, other in combinations(token.top.values(), 2)
    ]
    distances = [apart for apart in distances if apart > LEAST_STEP / 2]
    step = LARGEST_STEP
    while distances and step >= LEAST_STEP:
        multiples = sum(abs(apart - round(apart / step) * step) < STEP_ERROR for apart in distances)
        if multiples >= 0.8 * len(distances):
            return step
        step /= 2
    return None


def common(ours: Sequence[Token], theirs: Sequence[Token]) -> list[tuple[Token, Token]]:
    """Return the pairs of tokens up to the first that differ."""
    pairs = []
    for one, other in zip(ours, theirs, strict=False):
        if one.text != other.text:
            break
        pairs.append((one, other))
    return pairs


def noise_bodies(limits: Limits, seed: int, usable: set[str]) -> list[tuple[str, Object]]:
    """Return greedy requests with log-probabilities, to measure rounding with."""
    plain = usable & {*BOTH, "prefix", "long", "short"}
    made = (make_case(seed, index, limits, plain) for index in range(12))
    return [(case.path, case.body | extra_body("logprobs", case.path)) for case in made]


def curl(side: Side, path: str, body: Object, stream: bool, depth: Any) -> str:
    """Return a shell command that sends a request."""
    text = json.dumps(side.spelled(body, stream, depth) | side.endpoint.fields, ensure_ascii=False).replace(
        "'", "'\\''"
    )
    root = side.endpoint.url.rstrip("/").removesuffix("/v1")
    return f"curl {root}{path} -H 'Content-Type: application/json' -d '{text}'"
