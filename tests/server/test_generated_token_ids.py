"""Answers that begin with `generated_token_ids` go on as the answer that they are from, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.request_engines import make_engine
from support.server_thread import NAME, Running, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "def area(width):\n    return"
AREA = {"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {}}}}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
SEEDED = {"temperature": 1.0, "seed": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"logprobs": 2}),
    "seeded completion": (COMPLETIONS, {"temperature": 0.8, "seed": 11, **PENALTIES, "logprobs": 1}),
    "stop": (COMPLETIONS, {"stop": [":", "wid", "\n"], "max_tokens": 30, "logprobs": 0}),
    "chat": (CHAT, {**SEEDED, "logprobs": True}),
    "incomplete characters": (CHAT, {"logit_bias": {str(token): 20 for token in range(180, 200)}}),
    "tools": (CHAT, {"tools": [AREA], **SEEDED}),
    "forced tool": (CHAT, {"tools": [AREA], "tool_choice": "required", "logprobs": True, "max_tokens": 60, **SEEDED}),
    "json schema": (CHAT, {"response_format": JSON, **PENALTIES, "max_tokens": 60}),
    "json object": (CHAT, {"response_format": {"type": "json_object"}, "temperature": 0.8, "seed": 5}),
    "ebnf": (COMPLETIONS, {"ebnf": 'root ::= "def " [a-z]+ "(" ")"', "temperature": 0}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    pytest.importorskip("xgrammar")
    with serving(make_engine("union", max_len=256, grammars=True, adaptive=False), max_prompt_tokens=100) as running:
        yield running
        running.wait_until_idle()


def ask(server: Running, path: str, **fields: Any) -> tuple[int, Any]:
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    given = {"model": NAME, "max_tokens": 12, "return_token_ids": True, **prompt, **fields}
    status, _, answer = server.ask(path, given)
    if not fields.get("stream"):
        return status, json.loads(answer)
    *events, _ = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
    return status, [json.loads(event) for event in events]


def scored(choice: dict[str, Any], num_given: int = 0) -> list[Any]:
    """Return the log-probabilities of a choice without those of its first tokens."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(one["token"], pytest.approx(one["logprob"], abs=1e-4)) for one in logprobs["content"][num_given:]]
    names = ("tokens", "token_logprobs", "text_offset")
    return [[pytest.approx(v, abs=1e-4) for v in logprobs[n][num_given:]] if n != "tokens" else [] for n in names]


@pytest.mark.parametrize("kind", KINDS)
def test_answer_goes_on_from_any_cut_as_it_did(server: Running, kind: str) -> None:
    path, fields = KINDS[kind]
    status, whole = ask(server, path, **fields)
    assert status == 200, whole
    (want,) = whole["choices"]
    ids = want["token_ids"]
    assert len(ids) > 2
    for cut in sorted({1, 2, len(ids) // 2, len(ids) - 1}):
        begun = {**fields, "generated_token_ids": ids[:cut], "speculation": "off" if cut == 2 else "on"}
        status, again = ask(server, path, **begun)
        assert status == 200, again
        (got,) = again["choices"]
        for name in ("text", "message", "finish_reason", "token_ids"):
            if name == "message" and name in got:  # ids of calls are new
                for message in (got[name], want[name]):
                    for call in message.get("tool_calls", ()):
                        call["id"] = "call"
            assert got.get(name) == want.get(name), (name, cut)
        assert scored(got) == scored(want, cut)
        for name in ("prompt_tokens", "completion_tokens"):
            assert again["usage"][name] == whole["usage"][name]
        status, events = ask(
            server, path, **begun, stream=True, stream_options={"include_rounds": "tools" not in fields}
        )
        assert status == 200, events
        parts = [choice for event in events for choice in event["choices"]]
        assert [token for part in parts for token in part["token_ids"]] == ids
        said = [part["text"] if path == COMPLETIONS else part["delta"].get("content") or "" for part in parts]
        assert "".join(said) == (want["text"] if path == COMPLETIONS else want["message"]["content"] or "")


def test_choices_begin_alike_and_draw_by_seeds_of_their_own(server: Running) -> None:
    given = {**SEEDED, "generated_token_ids": [70, 71], "max_tokens": 8}
    status, both = ask(server, COMPLETIONS, **given, n=2)
    assert status == 200, both
    for index, choice in enumerate(both["choices"]):
        _, alone = ask(server, COMPLETIONS, **given | {"seed": 3 + index})
        assert choice["token_ids"] == alone["choices"][0]["token_ids"] and choice["token_ids"][:2] == [70, 71]


@pytest.mark.parametrize(
    "path, fields, param, message",
    [
        (
            CHAT,
            {"response_format": JSON, "generated_token_ids": [91, 70]},
            "generated_token_ids",
            "generated_token_ids has 70 at place 1, expected a token that response_format allows there",
        ),
        (
            CHAT,
            {"tools": [AREA], "tool_choice": "required", "generated_token_ids": [70]},
            "generated_token_ids",
            "generated_token_ids has 70 at place 0, expected a token that tool_choice allows there",
        ),
        (
            COMPLETIONS,
            {"generated_token_ids": [70] * 12},
            "generated_token_ids",
            "generated_token_ids has 12 entries, expected fewer than max_tokens (12)",
        ),
        (
            COMPLETIONS,
            {"generated_token_ids": [70, 0, 70]},
            "generated_token_ids",
            "generated_token_ids has 0 at place 1, expected no stop token (the text ends there)",
        ),
        (
            COMPLETIONS,
            {"generated_token_ids": [70, 4096]},
            "generated_token_ids",
            "generated_token_ids has 4096 at place 1, expected 0 to 2047 (the model's vocabulary)",
        ),
        (
            COMPLETIONS,
            {"generated_token_ids": [70] * 100, "max_tokens": 120},
            "prompt",
            "the prompt with generated_token_ids has 108 tokens, expected at most 100",
        ),
        (COMPLETIONS, {"generated_token_ids": "abc"}, "generated_token_ids", "expected a list of token ids"),
        (COMPLETIONS, {"generated_token_ids": [70], "echo": True}, "echo", "false with generated_token_ids"),
    ],
)
def test_tokens_that_cannot_have_been_generated_are_refused(
    server: Running, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer = ask(server, path, **fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param and message in answer["error"]["message"], answer
