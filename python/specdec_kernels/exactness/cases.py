"""Requests of a run, each drawn from the run's seed and its own index alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .material import KINDS, text_of

Object = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETIONS)
SEEDS_EACH = 16  # the choices of a request may have the seeds after its own
NUM_PREFIXES = 4  # texts that prompts of a run share
SHAPE: Object = {
    "type": "object",
    "properties": {"width": {"type": "integer", "maximum": 999}, "name": {"enum": ["square", "circle", "line"]}},
    "required": ["width", "name"],
    "additionalProperties": False,
}
PERSON: Object = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "tags", "active"],
    "additionalProperties": False,
}
SCHEMAS: list[Object] = [SHAPE, PERSON, {"type": "array", "items": SHAPE, "minItems": 1, "maxItems": 2}]
TOOLS: list[Object] = [
    {"type": "function", "function": {"name": "draw", "description": "Draw a shape.", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = '<tool_call>\n{"name": "draw", "arguments": {"width": 3, "name": "line"}}\n</tool_call>\n'
STOPS = ["\n", ").", "):", " the", "=", ",", ".", " a", "}", "0"]
REGEXES = [r"(yes|no), (0|[1-9][0-9]?)%", r"[a-z]{3,8}( [a-z]{2,6}){1,3}\.", r"\d{4}-\d{2}-\d{2}"]


@dataclass(frozen=True)
class Feature:
    """A part of a request that a server may or may not know.

    Attributes:
        share: the fraction of requests that have it.
        paths: where it exists.
        fields: draws its members of the body.
        group: a request has at most one feature of a group.
    """

    share: float
    paths: tuple[str, ...] = BOTH
    fields: Callable[[random.Random], Object] = lambda _: {}
    group: str | None = None


def penalties(rng: random.Random) -> Object:
    return rng.choice(
        [
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.8},
            {"presence_penalty": -0.3, "frequency_penalty": 0.4},
        ]
    )


def bias(rng: random.Random) -> Object:
    return {"logit_bias": {str(token): rng.choice([-100, -2.5, 4.0]) for token in rng.sample(range(3, 256), 4)}}


def schema(rng: random.Random) -> Object:
    given = {"name": "answer", "schema": rng.choice(SCHEMAS), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def stops(rng: random.Random) -> Object:
    return {"stop": rng.choice([rng.choice(STOPS), rng.sample(STOPS, 2), rng.sample(STOPS, 4)])}


def choice_of(*values: Object) -> Callable[[random.Random], Object]:
    return lambda rng: dict(rng.choice(values))


# Features that speculation breaks elsewhere. `Side.spelled` writes `regex` and `grammar` as the server's dialect does.
FEATURES: dict[str, Feature] = {
    # how the text begins
    "prefix": Feature(0.2, group="prompt"),
    "multi-turn": Feature(0.12, (CHAT,), group="prompt"),
    "long": Feature(0.06, group="prompt"),
    "short": Feature(0.08, group="prompt"),
    "token ids": Feature(0.06, (COMPLETIONS,), group="prompt"),
    "several prompts": Feature(0.06, (COMPLETIONS,), group="prompt"),
    # what the text may be
    "json schema": Feature(0.07, fields=schema, group="constraint"),
    "json object": Feature(0.03, fields=choice_of({"response_format": {"type": "json_object"}}), group="constraint"),
    "regex": Feature(0.05, fields=lambda rng: {"regex": rng.choice(REGEXES)}, group="constraint"),
    "grammar": Feature(
        0.03, fields=choice_of({"grammar": 'root ::= "def " [a-z]+ "(" ")" ":" " pass"'}), group="constraint"
    ),
    "tools": Feature(0.12, (CHAT,), choice_of({"tools": TOOLS, "tool_choice": "auto"}), "constraint"),
    "required tool": Feature(0.09, (CHAT,), choice_of({"tools": TOOLS, "tool_choice": "required"}), "constraint"),
    "named tool": Feature(
        0.09,
        (CHAT,),
        choice_of({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "draw"}}}),
        "constraint",
    ),
    # how tokens are chosen
    "seeded": Feature(
        0.5, fields=choice_of({"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0})
    ),
    "top_k": Feature(0.1, fields=choice_of({"top_k": 20}, {"top_k": 3})),
    "min_p": Feature(0.05, fields=choice_of({"min_p": 0.1})),
    "penalties": Feature(0.12, fields=penalties),
    "repetition_penalty": Feature(0.05, fields=choice_of({"repetition_penalty": 1.3}, {"repetition_penalty": 1.1})),
    "logit_bias": Feature(0.08, fields=bias),
    "n": Feature(0.12, fields=choice_of({"n": 2}, {"n": 3})),
    # how the text ends
    "stop": Feature(0.2, fields=stops),
    "stop_token_ids": Feature(0.06, fields=lambda rng: {"stop_token_ids": rng.sample(range(3, 256), 8)}),
    "ignore_eos": Feature(0.08, fields=choice_of({"ignore_eos": True})),
    "min_tokens": Feature(0.06, fields=choice_of({"min_tokens": 6})),
    # what the answer says
    "logprobs": Feature(0.35),
    "echo": Feature(0.04, (COMPLETIONS,), choice_of({"echo": True})),
    "stream": Feature(0.5),
    "cancel": Feature(0.08),
    # what only drafts read
    "prediction": Feature(0.06, (CHAT,)),
    "draft depth": Feature(0.3),
}
EXTRAS = ("regex", "grammar", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens")
NEEDS_SWITCH = "draft depth"
IDS = "return_token_ids"  # a field of all requests where both servers know it
BEGUN = "generated_token_ids"  # a field of requests that are asked again, where both know it
DEPTHS: tuple[Any, ...] = (1, 2, 4, 8, "on")


@dataclass(frozen=True)
class Limits:
    """The length limits of texts.

    Attributes:
        context: tokens of prompt and answer together.
        max_tokens: tokens of an answer; three times as many where it is JSON.
        chars_per_token: of each kind of material.
        long_prompt: tokens of the longest prompts.
    """

    context: int
    max_tokens: int
    chars_per_token: Mapping[str, float]
    long_prompt: int

    def chars(self, kind: str, tokens: int) -> int:
        return max(1, int(tokens * self.chars_per_token[kind]))


@dataclass(frozen=True)
class Case:
    """A request, or a conversation of several.

    Attributes:
        path: the endpoint.
        body: the first request, without `stream`.
        turns: what the user says after each answer.
        stream: whether the server under test streams; the reference answers as a whole.
        leaves_after: events of the stream after which the client leaves.
        depth: how much is drafted, where the server has a switch for it.
    """

    index: int
    path: str
    body: Object
    features: tuple[str, ...]
    turns: tuple[str, ...] = ()
    stream: bool = False
    leaves_after: int | None = None
    depth: Any = None


@dataclass
class Draws:
    """Draws a request. The number of draws does not depend on what the servers know."""

    rng: random.Random
    limits: Limits
    seed: int
    kind: str = "prose"
    body: Object = field(default_factory=dict)

    def text(self, tokens: int) -> str:
        return text_of(self.rng, self.kind, self.limits.chars(self.kind, tokens))

    def prefix(self) -> str:
        """Return one of the texts that prompts of this run share."""
        which = self.rng.randrange(NUM_PREFIXES)
        kind = list(KINDS)[which % len(KINDS)]
        tokens = min(self.limits.context // 4, 300)
        return text_of(random.Random(f"{self.seed} prefix {which}"), kind, self.limits.chars(kind, tokens))

    def prompt(self, features: Collection[str]) -> str:
        """Return a prompt of the form that the features ask for."""
        room = self.limits.context - 4 * self.limits.max_tokens - 32
        most = max(2, min(room // 2, 60))
        if "long" in features:
            longest = min(self.limits.long_prompt, int(room * 0.8))
            return self.text(self.rng.randint(longest // 2, longest))
        if "short" in features:
            return self.text(self.rng.randint(1, 3))
        if "prefix" in features:
            return self.prefix() + "\n" + self.text(self.rng.randint(2, 20))
        if "tools" in features and self.rng.random() < 0.5:
            return CALLS * 3
        return self.text(self.rng.randint(4, most))


def logprob_fields(path: str, num_top: int) -> dict[str, Any]:
    """Return the fields that ask for log-probabilities of tokens and of alternatives."""
    return {"logprobs": num_top} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": num_top}


def make_case(seed: int, index: int, limits: Limits, usable: Collection[str]) -> Case:
    """Return a request; features that are not usable are left out of it.

    `usable` has names of features, and the paths of endpoints, at least one.
    """
    rng = random.Random(f"{seed} {index}")
    draws = Draws(random.Random(f"{seed} {index} text"), limits, seed, rng.choice(list(KINDS)))
    wanted_path, wants = rng.choice(BOTH), {name: rng.random() for name in FEATURES}
    paths = [path for path in (wanted_path, *BOTH) if path in usable]
    path = paths[0]
    features, groups = [], set()
    for name in sorted(wants, key=lambda name: wants[name] / FEATURES[name].share):  # the most wanted of a group first
        feature = FEATURES[name]
        if wants[name] < feature.share and name in usable and path in feature.paths and feature.group not in groups:
            features.append(name)
            groups |= {feature.group} - {None}
    features = [name for name in FEATURES if name in features]
    for name, others in EXCLUDES.items():
        if name in features:
            features = [other for other in features if other not in others]

    many = 3 if "constraint" in groups else 1
    body: Object = {
        "max_tokens": rng.choice([1, 2, 5]) if rng.random() < 0.1 else limits.max_tokens * many,
        "temperature": 0,
        "seed": (seed * 1_000_003 + index * SEEDS_EACH) % 2**31,
    }
    for name in FEATURES:
        fields = FEATURES[name].fields(rng)  # drawn for all, so that features do not depend on each other
        if name in features:
            body |= fields
    if body.get("min_tokens", 0) > body["max_tokens"]:
        body["min_tokens"] = body["max_tokens"]
    num_top = rng.choice([0, 2, 5])
    if "logprobs" in features:
        body |= logprob_fields(path, num_top)
    depth, leaves_after, num_turns = rng.choice(DEPTHS), rng.choice([1, 2, 4, 8]), rng.randint(1, 2)
    prompt = draws.prompt(features)
    turns = tuple(draws.text(draws.rng.randint(2, 12)) for _ in range(num_turns)) if "multi-turn" in features else ()
    if "prediction" in features:
        body["prediction"] = {"type": "content", "content": draws.text(draws.rng.randint(8, 30))}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    elif "token ids" in features:
        body["prompt"] = [draws.rng.randrange(3, 256) for _ in range(draws.rng.choice([1, 2, 9, 30]))]
    elif "several prompts" in features:
        body["prompt"] = [prompt, draws.text(8)]
    else:
        body["prompt"] = prompt
    return Case(
        index=index,
        path=path,
        body=body,
        features=("chat" if path == CHAT else "completion", *features),
        turns=turns,
        stream="stream" in features or "cancel" in features,
        leaves_after=leaves_after if "cancel" in features else None,
        depth=depth if NEEDS_SWITCH in features else None,
    )


# Features without sense next to the one on the left.
EXCLUDES: dict[str, tuple[str, ...]] = {
    "cancel": ("echo",),
    "token ids": ("echo",),
    "echo": ("stream", "stop"),
    **{
        name: ("ignore_eos", "min_tokens", "stop_token_ids", "logit_bias")
        for name, feature in FEATURES.items()
        if feature.group == "constraint"
    },
}


def cases(seed: int, count: int, limits: Limits, usable: Collection[str]) -> Iterator[Case]:
    return (make_case(seed, index, limits, usable) for index in range(count))
