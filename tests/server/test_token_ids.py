"""Token ids in responses: vLLM's `return_token_ids` and `return_tokens_as_token_ids`, for every kind of answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.leaks import expect_nothing_left
from support.request_engines import make_engine
from support.server_thread import NAME, Running, serving
from support.tiny_checkpoint import tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "def area(width):\n    return"
AREA = {"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {}}}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {}),
    "prompts": (COMPLETIONS, {"prompt": [TEXT, [5, 6, 7]], "n": 2, "temperature": 0.9, "seed": 3}),
    "echo": (COMPLETIONS, {"echo": True, "logprobs": 2}),
    "prompt alone": (COMPLETIONS, {"echo": True, "max_tokens": 0}),
    "stop": (COMPLETIONS, {"stop": [":", "wid", "\n"], "max_tokens": 30}),
    "chat": (CHAT, {"n": 2, "temperature": 0.9, "seed": 3}),
    "incomplete characters": (CHAT, {"logit_bias": {str(token): 20 for token in range(180, 200)}}),
    "tools": (CHAT, {"tools": [AREA]}),
    "forced tool": (CHAT, {"tools": [AREA], "tool_choice": "required", "logprobs": True, "max_tokens": 60}),
    "json": (CHAT, {"response_format": {"type": "json_object"}}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with serving(make_engine("union", max_len=256, grammars=True, adaptive=False)) as running:
        yield running
        running.wait_until_idle()
        expect_nothing_left(running.engine)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    return {"model": NAME, "max_tokens": 12, **prompt, **fields}


def ask(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    status, _, answer = server.ask(path, body_of(path, **fields))
    assert status == 200, answer
    value: dict[str, Any] = json.loads(answer)
    return value


def stream(server: Running, path: str, **fields: Any) -> list[dict[str, Any]]:
    status, _, answer = server.ask(path, body_of(path, stream=True, **fields))
    assert status == 200, answer
    *events, done = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def ids_of(path: str, events: list[dict[str, Any]]) -> dict[int, tuple[list[int], list[int]]]:
    """Return the prompt's and the choice's token ids, by choice; of a whole answer or of a stream."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for event in events:
        for choice in event["choices"]:
            holder = choice if path == COMPLETIONS else event
            assert ("prompt_token_ids" in holder) == (choice["index"] not in found or len(events) == 1)
            given = holder.get("prompt_token_ids", [])
            found.setdefault(choice["index"], (given, []))[1].extend(choice["token_ids"])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_tokens_of_the_answer_whole_and_streamed(server: Running, kind: str) -> None:
    path, fields = KINDS[kind]
    plain = ask(server, path, **fields)
    whole = ask(server, path, **fields, return_token_ids=True)
    found = ids_of(path, [whole])
    assert found == ids_of(path, stream(server, path, **fields, return_token_ids=True))
    prompts = {tuple(prompt): len(prompt) for prompt, _ in found.values()}
    assert sum(prompts.values()) == whole["usage"]["prompt_tokens"]
    if kind != "prompt alone":
        assert sum(len(ids) for _, ids in found.values()) == whole["usage"]["completion_tokens"]
    assert "token_ids" not in json.dumps(plain)
    for choice, bare in zip(whole["choices"], plain["choices"], strict=True):
        prompt, ids = found[choice["index"]]
        if path == COMPLETIONS:
            text = tokenizer().decode([*prompt, *ids], skip_special_tokens=True)
            begun = tokenizer().decode(prompt, skip_special_tokens=True)
            assert text.startswith(begun + choice["text"].removeprefix(begun if fields.get("echo") else ""))
        assert bare.get("text") == choice.get("text")
        assert (choice["logprobs"] is None) == ("logprobs" not in fields)
        if kind == "forced tool":
            assert choice["message"]["tool_calls"] and len(choice["logprobs"]["content"]) == len(ids)


def test_ids_of_a_prompt_and_of_the_text_so_far_continue_it(server: Running) -> None:
    """A chat too, from its `prompt_token_ids`, greedy and seeded."""
    for fields in ({}, {"temperature": 1.0, "seed": 5}):
        whole = ask(server, CHAT, return_token_ids=True, **fields)
        prompt, ids = ids_of(CHAT, [whole])[0]
        rest = ask(server, COMPLETIONS, prompt=prompt + ids[:5], max_tokens=7, return_token_ids=True, **fields)
        assert ids_of(COMPLETIONS, [rest])[0] == (prompt + ids[:5], ids[5:])


@pytest.mark.parametrize("kind", ["completion", "echo", "chat", "forced tool"])
def test_tokens_of_log_probabilities_are_named_by_their_ids(server: Running, kind: str) -> None:
    path, fields = KINDS[kind]
    fields = fields | ({"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2})
    named, asked = {"return_tokens_as_token_ids": True}, {"return_token_ids": True}
    plain, whole = ask(server, path, **fields), ask(server, path, **fields, **named, **asked)
    for index, (choice, before) in enumerate(zip(whole["choices"], plain["choices"], strict=True)):
        prompt, ids = ids_of(path, [whole])[index]
        logprobs, usual = choice["logprobs"], before["logprobs"]
        if path == COMPLETIONS:
            names = [f"token_id:{token}" for token in [*(prompt if "echo" in fields else []), *ids]]
            assert logprobs["tokens"] == names
            assert logprobs["text_offset"] == usual["text_offset"]
            assert all(name in top for name, top in zip(names, logprobs["top_logprobs"], strict=True) if top)
        else:
            assert [entry["token"] for entry in logprobs["content"]] == [f"token_id:{token}" for token in ids]
            assert [entry["bytes"] for entry in logprobs["content"]] == [entry["bytes"] for entry in usual["content"]]
            tops = [top["token"] for entry in logprobs["content"] for top in entry["top_logprobs"]]
            assert tops and all(name.startswith("token_id:") for name in tops)
