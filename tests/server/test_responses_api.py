"""`/v1/responses` with OpenAI's own client: items, events in order, structured output, and stored responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import pytest
from openai import NotFoundError, OpenAI
from pydantic import BaseModel

from specdec_kernels.server.protocol import RequestError
from specdec_kernels.server.responses_api.items import as_messages, message_item, read_items
from specdec_kernels.server.responses_api.store import References, ResponseStore, StoredResponse, items_of
from support.request_engines import make_engine
from support.scripted import scripted
from support.server_thread import NAME, Running, serving
from support.tiny_checkpoint import tokenizer

RESPONSES = "/v1/responses"
TEMPLATE = "{{ messages | tojson }}{# <think> #}"
AREA: Any = {
    "type": "function",
    "name": "area",
    "parameters": {"type": "object", "properties": {"w": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "area", "arguments": {"w": 3}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pytest.importorskip("xgrammar")
    engine = make_engine("union", max_len=768, grammars=True, adaptive=False)
    with serving(engine, chat_template=TEMPLATE, max_stored_responses=8) as running:
        yield running


def text_of(tokens: list[int]) -> Any:
    messages = json.loads(tokenizer().decode(tokens))
    return [{k: v for k, v in message.items() if k != "thinking"} for message in messages]  # another name of reasoning


def without_ids(items: Any) -> Any:
    """Return items without what differs: ids, and what the client adds."""
    values = json.loads(json.dumps([item.to_dict() for item in items]))
    for one in [*values, *(part for value in values for part in value.get("content") or [])]:
        for name in ("id", "call_id", "parsed", "parsed_arguments"):
            one.pop(name, None)
    return values


def test_response_has_the_text_and_usage_of_the_chat(server: Running, client: OpenAI) -> None:
    given: dict[str, Any] = {"model": NAME, "temperature": 0}
    chat = client.chat.completions.create(**given, messages=[{"role": "user", "content": "def f("}], max_tokens=20)
    got = client.responses.create(**given, input="def f(", max_output_tokens=20, metadata={"a": "b"}, user="me")
    assert (got.output_text, got.status, got.model) == (chat.choices[0].message.content, "incomplete", NAME)
    assert got.incomplete_details is not None and got.incomplete_details.reason == "max_output_tokens"
    assert got.usage is not None and chat.usage is not None
    assert (got.usage.input_tokens, got.usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert got.usage.total_tokens == chat.usage.total_tokens
    assert (got.metadata, got.user, got.max_output_tokens, got.temperature) == ({"a": "b"}, "me", 20, 0)
    assert got.id.startswith("resp_") and got.error is None and got.tools == [] and got.tool_choice == "auto"


def test_output_has_an_item_for_reasoning_text_and_each_call(server: Running, client: OpenAI) -> None:
    """The events of a stream make up the same items, with numbers in order."""
    with scripted(server, f"{THOUGHT}Look:\n{CALL}\n{CALL}"):
        whole = client.responses.create(model=NAME, input="x", tools=[AREA], max_output_tokens=300)
        with client.responses.stream(model=NAME, input="x", tools=[AREA], max_output_tokens=300) as stream:
            events: list[Any] = list(stream)
            final = stream.get_final_response()
        raw: list[Any] = list(
            client.responses.create(model=NAME, input="x", tools=[AREA], max_output_tokens=300, stream=True)
        )
    reasoning, message, *calls = whole.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "Hm."
    assert message.type == "message" and whole.output_text == "Look:" and whole.status == "completed"
    assert [(call.type, call.name, call.arguments) for call in calls if call.type == "function_call"] == [
        ("function_call", "area", '{"w": 3}')
    ] * 2
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 0
    assert without_ids(final.output) == without_ids(whole.output)
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in raw)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == "Look:"
    assert [event.output_index for event in raw if event.type == "response.output_item.done"] == [0, 1, 2, 3]
    assert any(event.type == "response.function_call_arguments.delta" and event.snapshot for event in events)


def test_items_of_a_conversation_become_messages(server: Running, client: OpenAI) -> None:
    """Text, reasoning and calls of one turn are one message."""
    with scripted(server, f"{THOUGHT}Look:{CALL}", "It is 9.") as prompts:
        first = client.responses.create(
            model=NAME, instructions="Be brief.", input=[{"role": "user", "content": "Area?"}], tools=[AREA]
        )
        call = first.output[-1]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Area?"}]}, *first.output, result]
        client.responses.create(model=NAME, input=items)
        client.responses.create(model=NAME, input=[result], previous_response_id=first.id)
    assert text_of(prompts[0]) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Area?"}]
    function = {"name": "area", "arguments": {"w": 3}}
    want = [
        {"role": "user", "content": "Area?"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "9", "tool_call_id": call.call_id},
    ]
    assert text_of(prompts[1]) == want and text_of(prompts[2]) == want, "instructions are those of the request alone"


class Corner(BaseModel):
    x: Literal["left", "right"]


class Shape(BaseModel):
    corner: Corner
    other: Corner | None


def test_parsed_output_has_the_type_asked_for(client: OpenAI) -> None:
    given: dict[str, Any] = {
        "model": NAME,
        "input": "x",
        "text_format": Shape,
        "temperature": 1,
        "max_output_tokens": 400,
    }
    got = client.responses.parse(**given)
    assert isinstance(got.output_parsed, Shape)
    with client.responses.stream(**given) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Shape)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "area"}, "allowed"])
def test_forced_tool_is_called(client: OpenAI, choice: Any) -> None:
    other = AREA | {"name": "other"}
    if choice == "allowed":
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "area"}]}
    got = client.responses.create(
        model=NAME, input="x", tools=[AREA, other], tool_choice=choice, temperature=0, max_output_tokens=300
    )
    (call,) = got.output
    assert (
        call.type == "function_call" and call.name in ("area", "other") and isinstance(json.loads(call.arguments), dict)
    )
    assert choice == "required" or call.name == "area"


def test_logprobs_cover_the_text_without_its_reasoning(server: Running, client: OpenAI) -> None:
    with scripted(server, THOUGHT + "Hello"):
        given: dict[str, Any] = {"model": NAME, "input": "x", "top_logprobs": 2, "max_output_tokens": 60}
        whole = client.responses.create(**given)
        events = list(client.responses.create(**given, stream=True, include=["message.output_text.logprobs"]))
    part: Any = whole.output[-1].to_dict()["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]).strip().removesuffix("<|endoftext|>") == "Hello"
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one["token"] for one in part["logprobs"]]


def test_stored_response_is_found_until_it_is_deleted(server: Running, client: OpenAI) -> None:
    first = client.responses.create(
        model=NAME, input=[{"role": "user", "content": one} for one in "abc"], max_output_tokens=2
    )
    assert client.responses.retrieve(first.id) == first
    listed = client.responses.input_items.list(first.id, order="asc", limit=2)
    assert [item.to_dict()["content"] for item in listed] == [[{"type": "input_text", "text": one}] for one in "abc"]
    path = f"{RESPONSES}/{first.id}/input_items"
    page = json.loads(server.ask(f"{path}?limit=2")[2])
    assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"] and page["has_more"]
    assert server.error(f"{path}?limit=0", None) == (400, 'limit is "0", expected 1 to 100', "limit")
    assert server.error(f"{path}?order=up", None) == (400, 'order is "up", expected "asc" or "desc"', "order")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    with scripted(server, "ok") as prompts:
        client.responses.create(model=NAME, input=[reference], store=False)
    assert text_of(prompts[0]) == [{"role": "assistant", "content": first.output_text}]
    client.responses.delete(first.id)
    message = f'response_id is "{first.id}", expected that of a stored response'
    assert server.error(f"{RESPONSES}/{first.id}", None) == (404, message, "response_id")
    with pytest.raises(NotFoundError):
        client.responses.delete(first.id)
    body = {"input": "x", "previous_response_id": first.id}
    message = message.replace("response_id", "previous_response_id")
    assert server.error(RESPONSES, body) == (404, message, "previous_response_id")


def test_response_that_is_not_to_be_stored_is_not(server: Running, client: OpenAI) -> None:
    got = client.responses.create(model=NAME, input="x", store=False, max_output_tokens=1)
    assert server.error(f"{RESPONSES}/{got.id}", None)[0] == 404


def test_cancelled_response_keeps_its_output(server: Running, client: OpenAI) -> None:
    stream = client.responses.create(
        model=NAME, input="x", stream=True, max_output_tokens=100_000, extra_body={"ignore_eos": True}
    )
    types = []
    for event in stream:
        types.append(event.type)
        if event.type == "response.created":
            assert client.responses.retrieve(event.response.id).status == "in_progress"
            cancelled = client.responses.cancel(event.response.id)
            assert cancelled.status == "cancelled"
        last = event
    assert types[-1] == "response.incomplete"
    response: Any = last.to_dict()["response"]
    assert response["status"] == "cancelled" and response["usage"]["output_tokens"] < 700
    got = client.responses.retrieve(response["id"])
    assert got.status == "cancelled"
    status, message, _ = server.error(f"{RESPONSES}/{got.id}/cancel", {})
    assert (status, message) == (400, f'response_id is "{got.id}", which is cancelled, expected one in progress')


def test_response_that_fails_says_so(server: Running, client: OpenAI) -> None:
    """As its last event, or as an error."""
    given: dict[str, Any] = {"model": NAME, "input": "x", "extra_body": {"timeout": 0.001, "ignore_eos": True}}
    *_, last = client.responses.create(**given, stream=True)
    assert last.type == "response.failed" and last.response.error is not None and last.response.status == "failed"
    assert last.response.error.message.startswith("timeout is 0.001, expected more seconds")
    status, message, param = server.error(RESPONSES, {"input": "x", "timeout": 0.001, "ignore_eos": True})
    assert (status, param) == (504, "timeout") and message.startswith("timeout is 0.001")


def test_response_needs_the_key() -> None:
    with serving(make_engine(), api_key="secret") as running:
        for path, body in ((RESPONSES, {"input": "x"}), (f"{RESPONSES}/a", None), (f"{RESPONSES}/a/cancel", {})):
            assert running.error(path, body)[0] == 401


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"input": None}, "input is missing, expected a string or a list of items", "input"),
        ({"input": 3}, "input is 3, expected a string or a list of items", "input"),
        ({"input": []}, "input is [], expected at least 1 message", "input"),
        ({"input": [3]}, "input[0] is 3, expected a message, function_call, function_call_output, reasoning or item_reference", "input"),
        ({"input": [{"type": "web_search_call"}]}, 'input[0] is {"type": "web_search_call"}, expected a message, function_call, function_call_output, reasoning or item_reference', "input"),
        ({"input": [{"role": "critic", "content": ""}]}, 'input[0].role is "critic", expected one of user, assistant, system, developer', "input"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing, expected a string or a list of parts", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 'input[0].content[0] is {"type": "input_image"}, expected {"type": "input_text", "text": ...}', "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "x"}]}, 'input[0].arguments is "x", expected an object as JSON', "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 'input[0].id is "a", expected that of an item of a stored response', "input"),
        ({"input": "x " * 2000}, None, "input"),
        ({"input": [{"role": "user", "content": ""}] * 10_001}, "input has 10001 items, expected at most 10000", "input"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0, expected at least 1", "max_output_tokens"),
        ({"background": True}, "background is true, expected none (this field is not supported)", "background"),
        ({"truncation": "auto"}, 'truncation is "auto", expected none (this field is not supported)', "truncation"),
        ({"conversation": "c"}, 'conversation is "c", expected none (this field is not supported)', "conversation"),
        ({"messages": []}, "messages is [], expected none (this field is not supported)", "messages"),
        ({"include": ["all"]}, None, "include"),
        ({"tools": [{"type": "web_search"}]}, 'tools[0] is {"type": "web_search"}, expected {"type": "function", "name": ...}', "tools"),
        ({"tool_choice": "any"}, 'tool_choice is "any", expected "auto", "none", "required", {"type": "function", "name": ...} or allowed_tools', "tool_choice"),
        ({"tool_choice": "required"}, 'tool_choice is "required", expected one of tools, which are []', "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing, expected an object", "text.format.schema"),
        ({"reasoning": {"effort": "much"}}, 'reasoning.effort is "much", expected one of none, minimal, low, medium, high, xhigh, max', "reasoning.effort"),
        ({"reasoning": {"effort": "high"}}, 'reasoning.effort is "high", expected none or "medium" (the chat template does not read it)', "reasoning.effort"),
        ({"temperature": -1}, "temperature is -1, expected a number from 0 (greedy) on", "temperature"),
        ({"top_logprobs": 21}, "top_logprobs is 21, expected 0 to 20", "top_logprobs"),
        ({"model": "gpt-5"}, 'model is "gpt-5", expected "tiny"', "model"),
    ],
)  # fmt: skip
def test_bad_field_is_refused_by_name(server: Running, fields: dict[str, Any], message: str | None, param: str) -> None:
    status, got, name = server.error(RESPONSES, {"input": "x"} | fields)
    assert (status, name) == (404 if param == "model" else 400, param)
    assert message in (None, got) and got.startswith(param)


def test_fields_without_effect_are_accepted(server: Running, client: OpenAI) -> None:
    got = client.responses.create(
        model=NAME,
        input="x",
        max_output_tokens=1,
        background=False,
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        max_tool_calls=3,
        parallel_tool_calls=False,
        prompt_cache_key="a",
        reasoning={"summary": "auto"},
        safety_identifier="b",
        service_tier="auto",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tool_choice="none",
        truncation="disabled",
    )
    assert got.status == "incomplete"


# --- the store


def stored(name: str, size: int = 0, previous: str | None = None) -> StoredResponse:
    response = {"id": name, "output": [message_item("assistant", f"to {name}")]}
    return StoredResponse(response, [message_item("user", name + "." * size)], previous)


def texts(items: list[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_store_keeps_the_most_recently_used_responses() -> None:
    store = ResponseStore(3, 1 << 20)
    for name, previous in (("a", None), ("b", None), ("c", "a")):
        store.put(stored(name, previous=previous))
    assert texts(items_of(store.conversation("c"))) == ["a", "to a", "c", "to c"]
    store.put(stored("d"))
    with pytest.raises(RequestError, match=r'^id is "b", expected that of a stored response$'):
        store.get("id", "b")
    assert texts(items_of(store.conversation("c"))) == ["a", "to a", "c", "to c"], "the conversation was used"
    store.delete("a")
    with pytest.raises(RequestError, match=r'^previous_response_id is "a", expected that of a stored response$'):
        store.conversation("c")


def test_store_is_bounded_by_bytes() -> None:
    store = ResponseStore(100, 10_000)
    for index in range(20):
        store.put(stored(str(index), size=1000))
        assert store.num_bytes <= 10_000
    assert 4 < len(store) < 10
    store.put(stored("large", size=20_000))
    assert len(store) == store.num_bytes == 0
    kept = ResponseStore(0, 10_000)
    kept.put(stored("a"))
    assert len(kept) == 0


def test_item_is_found_as_long_as_its_response_is_stored() -> None:
    store = ResponseStore(10, 10_000)
    one = stored("a")
    store.put(one)
    assert References(store).find(one.items[0]["id"]) == one.items[0] and References(store).find("b") is None
    store.delete("a")
    assert References(store).find(one.items[0]["id"]) is None


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    given = [
        call,
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
        call,
    ]
    messages = as_messages(read_items(given, lambda _: None))
    assert [sorted(message) for message in messages] == [
        ["content", "role", "tool_calls"],
        ["content", "role"],
        ["content", "reasoning_content", "role", "tool_calls"],
    ]
