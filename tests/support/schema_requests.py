"""Requests for texts of JSON schemas, by an engine and by a server, and what they must hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from specdec_kernels import FinishReason
from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.engine.grammars import Grammars
from specdec_kernels.engine.text.json_schemas import moved
from specdec_kernels.server.protocol.requests import schema_of_calls
from support.held_schemas import check_text, closed
from support.server_thread import NAME, Running
from support.tiny_checkpoint import Comparison, exact_model, tokenizer

NEW_TOKENS = 160
MOST_ROUNDOFF = 8e-6  # between the logits of two tokens: moves a draw's boundary by at most 2e-6


class TextRequest(NamedTuple):
    """A request for a text of a schema.

    Attributes:
        schema: what the text must meet, or a property of the arguments of a call, or the arguments.
        words: of a conversation, or of the prompt, which a newline ends.
        sampling: parameters of the text, or of the whole call.
        is_call: whether a call of a tool is forced.
    """

    schema: Any
    words: str
    sampling: SamplingParams
    is_call: bool = False

    @property
    def prompt(self) -> str:
        return self.words + "\n"

    @property
    def is_wrapped(self) -> bool:
        """Whether the schema is that of a property, because arguments are an object."""
        return self.is_call and self.schema.get("type") != "object"

    @property
    def tools(self) -> list[dict[str, Any]]:
        wrapped = closed("value", value=moved(self.schema, "#/properties/value"))
        parameters = wrapped if self.is_wrapped else self.schema
        return [{"type": "function", "function": {"name": "draw", "parameters": parameters}}]

    def as_call(self) -> TextRequest:
        """Return the same request for a call of a tool."""
        call = self._replace(is_call=True)
        return call._replace(sampling=replace(self.sampling, json_schema=schema_of_calls(call.tools)))

    @property
    def path(self) -> tuple[str, ...]:
        """From the arguments, or from the text, to what must meet the schema."""
        return ("value",) if self.is_wrapped else ()


class Text(NamedTuple):
    """A text of a request.

    Attributes:
        tokens: token ids.
        logprobs: of each token.
        json: the text, or the arguments of a call; None: the budget cut it off.
        path: names from there to what must meet the schema.
    """

    tokens: list[int]
    logprobs: list[float]
    json: str | None
    path: tuple[str, ...]

    @property
    def value(self) -> Any:
        """What must meet the schema."""
        value = json.loads(self.json or "null")
        for name in self.path:
            value = value[name]
        return value


def requests_for(schema: Any, numbers: Sequence[int]) -> list[TextRequest]:
    """Return requests of these numbers: the even ones greedy after different prompts, the odd ones drawn.

    Every second of each kind prefers to end: some texts of numbers would not within their budget.
    """
    end = tokenizer().eos_token_id
    return [
        TextRequest(
            schema,
            f"def area{i}(",
            SamplingParams(
                NEW_TOKENS,
                json_schema=schema,
                temperature=i % 2,
                seed=i,
                logit_bias={end: 30.0} if i % 4 > 1 else None,
                logprobs=True,
            ),
        )
        for i in numbers
    ]


def by_engine(engine: Engine, requests: list[TextRequest], **options: Any) -> list[Text]:
    """Return texts of `Engine.generate`; `options` replace sampling parameters."""
    outputs = engine.generate([one.prompt for one in requests], [replace(one.sampling, **options) for one in requests])
    return [
        Text(
            output.tokens,
            [token.logprob for token in output.logprobs or ()],
            output.text if output.finish_reason == FinishReason.STOP else None,
            (*["arguments"] * one.is_call, *one.path),
        )
        for one, output in zip(requests, outputs, strict=True)
    ]


def by_server(server: Running, requests: list[TextRequest]) -> list[Text]:
    """Return texts of `response_format`, or arguments of forced calls."""

    def answer(one: TextRequest) -> Text:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": one.schema}}
        status, _, data = server.ask(
            "/v1/chat/completions",
            {
                "model": NAME,
                "messages": [{"role": "user", "content": one.words}],
                "max_tokens": NEW_TOKENS,
                "temperature": one.sampling.temperature,
                "seed": one.sampling.seed,
                "logit_bias": {str(token): value for token, value in (one.sampling.logit_bias or {}).items()},
                "logprobs": True,
                "return_token_ids": True,
            }
            | ({"tools": one.tools, "tool_choice": "required"} if one.is_call else {"response_format": form}),
        )
        assert status == 200, data
        (choice,) = json.loads(data)["choices"]
        scored = choice["logprobs"]["content"]
        text = None
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            text = call["function"]["arguments"]
        elif choice["finish_reason"] == "stop":
            text = choice["message"]["content"]
        return Text(choice["token_ids"], [token["logprob"] for token in scored], text, one.path)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(answer, requests))


def largest_change(one: Text, other: Text) -> float:
    """Return the largest distance between log-probabilities of the tokens that both texts begin with."""
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
    return max((abs(a - b) for *_, a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)), default=0.0)


def check_pairs(requests: list[TextRequest], plain: list[Text], drafted: list[Text]) -> str:
    """Check that texts meet their schemas, and that those with speculation are those without it.

    Texts may part at a near-tie. Roundoff is measured: no margin counts that is larger than what it changes elsewhere.

    Returns:
        A line about what was compared.
    """
    change = max(map(largest_change, plain, drafted))
    comparison = Comparison(exact_model(), roundoff=min(MOST_ROUNDOFF, 2 * change))
    grammars = Grammars(tokenizer(), "", len(tokenizer()))
    for one, expected, found in zip(requests, plain, drafted, strict=True):
        for text in (expected, found):
            if text.json is not None:
                check_text(text.json, one.schema, text.path)
        if found.tokens == expected.tokens:
            # A call that the budget cuts off after its last brace is one for the server, but no whole text.
            assert found.json is not None or expected.json is None, one
            assert expected.json is None or found.value == expected.value, one
            continue
        shorter = min(len(found.tokens), len(expected.tokens))
        assert found.tokens[:shorter] != expected.tokens[:shorter], f"one text is a part of the other: {one}"
        new_matcher = grammars.new_matcher(one.sampling, [tokenizer().eos_token_id])
        prompt = tokenizer()(one.prompt)["input_ids"]
        comparison.check(prompt, found.tokens[:shorter], expected.tokens[:shorter], one.sampling, new_matcher)
    num_ties, num_ended = len(comparison.near_ties), sum(one.json is not None for one in drafted)
    assert num_ties <= 2 + len(requests) // 200, comparison.near_ties
    return (
        f"{len(requests)} pairs, {num_ended} complete, {num_ties} near-ties, log-probabilities change by {change:.1e}"
    )
