"""Requests that ask for more than a server has, or for what JSON cannot say: each is refused by name, and at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.server import strict_json
from specdec_kernels.server.tool_calls import FirstCall, Hermes, ToolCall
from specdec_kernels.tiny import tiny_model
from support.server_thread import Running, serving

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "def f"}]
BODIES = {CHAT: {"messages": MESSAGES, "max_tokens": 2}, COMPLETE: {"prompt": "def f", "max_tokens": 2}}
CALL = '<tool_call>{"name": "area", "arguments": {"a": %s}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(tiny_model("target"), device="cpu", max_len=128, num_slots=2, adaptive=False)
    with serving(engine, chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"chat_template_kwargs": {"padding": "max_length", "max_length": 100000000}},
         'chat_template_kwargs.padding is "max_length", expected none'),
        (CHAT, {"chat_template_kwargs": {"truncation": True}}, "chat_template_kwargs.truncation is true, expected none"),
        (CHAT, {"chat_template_kwargs": {"tokenizer_kwargs": {}}},
         "chat_template_kwargs.tokenizer_kwargs is {}, expected none"),
        (COMPLETE, {"presence_penalty": 1e39}, "presence_penalty is 1e+39, expected a finite number of 32 bits"),
        (COMPLETE, {"frequency_penalty": -1e300}, "frequency_penalty is -1e+300, expected a finite number of 32 bits"),
        (COMPLETE, {"repetition_penalty": 1e39}, "repetition_penalty is 1e+39, expected a finite number of 32 bits above 0"),
        (COMPLETE, {"repetition_penalty": 1e-300},
         "repetition_penalty is 1e-300, expected a finite number of 32 bits above 0"),
        (COMPLETE, {"stop_token_ids": [2**40]}, "stop_token_ids has 1099511627776, expected 0 to 2147483647"),
        (COMPLETE, {"speculation": 2**40},
         "speculation is 1099511627776, expected 'on', 'off' or a number of nodes from 1 on"),
        (COMPLETE, {"logit_bias": {"9" * 5000: 1}},
         f'logit_bias has "{"9" * 56}...: 1, expected token ids with a number each'),
        (COMPLETE, {"prompt": "a" * 10**6}, "prompt has 1000000 characters, expected at most 32768 (max_len tokens)"),
        ("/tokenize", {"prompt": ["a", "b"]}, 'prompt is ["a", "b"], expected one prompt'),
    ],
)  # fmt: skip
def test_server_refuses_values_out_of_range(server: Running, path: str, fields: dict[str, Any], message: str) -> None:
    assert server.error(path, BODIES.get(path, {}) | fields)[:2] == (400, message)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        ("1" + "0" * 400, f"the integer 1{'0' * 39} has more than 64 bits"),
        ("1e999", "the number 1e999 is beyond 64-bit floats"),
        ("NaN", "NaN is no number of JSON"),
    ],
)
def test_server_refuses_numbers_that_json_cannot_send(server: Running, number: str, reason: str) -> None:
    body = json.dumps(BODIES[COMPLETE])[:-1] + f', "temperature": {number}}}'
    got = server.error(COMPLETE, body.encode())
    assert got[:2] == (400, f"the body is no JSON ({reason}), expected a JSON object")


def test_server_refuses_deep_tool_arguments(server: Running) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 200000}}
    status, message, _ = server.error(CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert status == 400 and message.endswith("expected arguments that are an object as JSON")


def test_server_answers_while_a_long_text_is_refused(server: Running) -> None:
    begin = time.monotonic()
    assert server.error(COMPLETE, {"prompt": "a" * 7_000_000})[0] == 400
    assert server.ask(COMPLETE, BODIES[COMPLETE])[0] == 200
    assert time.monotonic() - begin < 5  # tokenized, such a text takes longer, and gigabytes of memory


def test_max_completion_tokens_counts_before_max_tokens(server: Running) -> None:
    answer = json.loads(server.ask(CHAT, {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 2})[2])
    assert answer["usage"]["completion_tokens"] <= 2


def test_chat_refuses_arguments_of_the_tokenizer() -> None:
    with (
        Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1) as engine,
        pytest.raises(ValueError) as error,
    ):
        engine.chat(MESSAGES, SamplingParams(1), chat_template=TEMPLATE, padding="max_length")
    assert str(error.value) == "chat: padding is given, expected variables of the chat template"


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [(r'"\ud83d"', r'{"a": "\ud83d"}'), ('"\u00e9"', '{"a": "\u00e9"}'), ("NaN", None), ("1e999", None)],
)
def test_tool_calls_hold_json_that_can_be_sent(argument: str, arguments: str | None) -> None:
    """Half a surrogate pair stays an escape; what is no JSON is text."""
    parser, text = Hermes(["area"]), CALL % argument
    found = parser.push(text) + parser.finish()
    if arguments is None:
        assert "".join(map(str, found)) == text
    else:
        [call] = found
        assert isinstance(call, ToolCall) and call["function"]["arguments"] == arguments
        assert strict_json.loads(arguments) == json.loads(arguments) and arguments.encode()


def test_first_call_drops_what_follows_it() -> None:
    parser = FirstCall(Hermes(["area"]))
    found = parser.push("text " + CALL % "1" + "\n" + CALL % "2" + " more") + parser.finish()
    text, call = found
    assert text == "text" and isinstance(call, ToolCall) and call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 1.5}, "SamplingParams: max_new_tokens is 1.5, expected an integer"),
        ({"max_new_tokens": 10**30}, f"SamplingParams: max_new_tokens is {10**30}, expected at most 2147483647"),
        ({"seed": 1.5}, "SamplingParams: seed is 1.5, expected an integer"),
        ({"priority": True}, "SamplingParams: priority is True, expected an integer"),
        ({"stop_token_ids": [2**31]}, "SamplingParams: stop_token_ids has 2147483648, expected 0 to 2147483647"),
    ],
)
def test_sampling_params_refuse_other_integers(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**values)
    assert str(error.value) == message
