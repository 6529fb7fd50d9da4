"""Requests that ask for more than a server has, or for what JSON cannot say: each is refused by name, and at once."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.server import strict_json
from specdec_kernels.server.parsers import TOOL_PARSERS, FirstCall, ToolCall
from specdec_kernels.tiny import tiny_model
from support.server_thread import Running, serving

SLOWNESS = 5  # other tests run on the same cores
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ message['name'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "def f"}]
BODIES = {CHAT: {"messages": MESSAGES, "max_tokens": 2}, COMPLETE: {"prompt": "def f", "max_tokens": 2}}
CALL = '<tool_call>{"name": "area", "arguments": {"a": %s}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(tiny_model("target"), device="cpu", max_len=128, num_slots=2, adaptive=False, grammars=True)
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
        (COMPLETE, {"stop": ["ab"] * 65}, "stop has 65 entries, expected at most 64"),
        (COMPLETE, {"stop": "a<|endoftext|>"},
         "stop is 'a<|endoftext|>' with the special token <|endoftext|>, expected that token alone"),
        (COMPLETE, {"ebnf": "root ::= root"},
         "ebnf allows no token of the vocabulary at the start of the text, expected at least one"),
        (CHAT, {"messages": [{"role": "user", "name": "a" * 10**6}]},
         "messages has 1000004 characters, expected at most 32768 (max_len tokens)"),
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


@pytest.mark.parametrize("path", [COMPLETE, "/tokenize"])
def test_server_counts_prompts_before_it_tokenizes_them(server: Running, path: str) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("the prompts were tokenized")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine.core.inputs, "tokenize", fail)
        status, message, _ = server.error(path, {"prompt": ["a"] * 3000})
    assert status == 400 and message.endswith(("texts, expected at most 2050", "expected one prompt"))


def test_client_that_leaves_during_its_upload_logs_nothing(server: Running) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"POST {COMPLETE} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{{".encode())
            time.sleep(0.2)
        time.sleep(0.2)
        assert server.ask("/health")[0] == 200
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def test_server_answers_while_a_long_text_is_refused(server: Running) -> None:
    begin = time.process_time()  # of the server, too
    assert server.error(COMPLETE, {"prompt": "a" * 7_000_000})[0] == 400
    assert server.ask(COMPLETE, BODIES[COMPLETE])[0] == 200
    assert time.process_time() - begin < 5  # tokenized, such a text takes longer, and gigabytes of memory


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
    parser, text = TOOL_PARSERS["hermes"]({"area": None}), CALL % argument
    found = parser.push(text) + parser.finish()
    if arguments is None:
        assert "".join(map(str, found)) == text
    else:
        [call] = found
        assert isinstance(call, ToolCall) and call["function"]["arguments"] == arguments
        assert strict_json.loads(arguments) == json.loads(arguments) and arguments.encode()


def test_first_call_drops_what_follows_it() -> None:
    parser = FirstCall(TOOL_PARSERS["hermes"]({"area": None}))
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


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_special_token_as_stop_string_ends_the_text(ignore_eos: bool) -> None:
    """Text is decoded without special tokens, so that no search in it finds one."""
    with Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False) as engine:
        token = engine.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        bias = {token: 100.0}
        params = SamplingParams(4, ignore_eos=ignore_eos, logit_bias=bias, stop="<|endoftext|>")
        (output,) = engine.generate("def f", params)
        assert (output.tokens, output.text, output.finish_reason.name) == ([token], "", "STOP")


def test_server_ends_texts_at_the_end_of_turn_of_the_tokenizer() -> None:
    engine = Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False)
    end = engine.tokenizer.encode(" import")[0]
    engine.tokenizer.eos_token = engine.tokenizer.convert_ids_to_tokens(end)
    assert end not in engine.eos_token_ids
    body = {"prompt": "def f", "max_tokens": 4, "logit_bias": {str(end): 100}}
    with serving(engine) as running:
        for more, reason in (({}, "stop"), ({"stop_token_ids": [5]}, "stop"), ({"ignore_eos": True}, "length")):
            [choice] = json.loads(running.ask(COMPLETE, body | more)[2])["choices"]
            assert choice["finish_reason"] == reason


def test_detokenize_counts_tokens_first(server: Running) -> None:
    got = server.error("/detokenize", {"tokens": [5] * 10**6})
    assert got == (400, "tokens has 1000000 entries, expected at most 128 (max_len)", "tokens")


def test_template_that_loops_for_years_is_ended() -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    engine = Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False)
    with serving(engine, chat_template=template) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_kernels.engine.text.prompts.TEMPLATE_SECONDS", 0.5)
        got = server.error(CHAT, BODIES[CHAT])
    message = "messages do not fit the chat template: the chat template takes more than 0.5 s, expected less"
    assert got == (400, message, "messages")


def test_error_of_a_template_names_no_folder(server: Running) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("/srv/models/llama/tokenizer.json: no such file, see https://example.com/a/b or 'x/y/z'")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine.core.inputs, "tokenize_chat", fail)
        message = server.error(CHAT, BODIES[CHAT])[1]
    assert message == (
        "messages do not fit the chat template: tokenizer.json: no such file, see https://example.com/a/b or 'x/y/z'"
    )


def test_long_text_is_counted_before_all_of_its_tokens_are_in_memory() -> None:
    """A text below the limit of characters may still have more tokens than fit."""
    with Engine(tiny_model("target"), device="cpu", max_len=2048, num_slots=1, adaptive=False) as engine:
        inputs, tokenizer, longest = engine.core.inputs, engine.tokenizer, 0

        def tokenize(texts: Any, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, *map(len, [texts] if isinstance(texts, str) else texts))
            return tokenizer(texts, **options)

        inputs.tokenizer = tokenize
        inputs._longest_token = 256
        with pytest.raises(ValueError) as error:
            engine.submit("a b " * 120_000)
    assert str(error.value) == "submit: prompt has more than 2048 tokens, expected at most 2047 (max_len - 1)"
    assert longest <= 1 << 16


def resident_bytes() -> int:
    """Return the memory of this process, which is the server's as well."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, '{"prompt": "%s"}' % ("a b " * 1_900_000)),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": "%s"}}'
         % ("a b " * 1_900_000)),
        (COMPLETE, '{"prompt": [%s1]}' % ("1," * 3_900_000)),
        (COMPLETE, '{"prompt": [%s[]]}' % ("[]," * 2_600_000)),
        (COMPLETE, '{"prompt": "a", "stop": [%s"a"]}' % ('"b",' * 1_900_000)),
        (COMPLETE, '{"prompt": "a", "logit_bias": {%s"1": 1}}' % ('"1":1,' * 1_300_000)),
        ("/detokenize", '{"tokens": [%s1]}' % ("1," * 3_900_000)),
        ("/tokenize", '{"prompt": "%s"}' % ("a b " * 1_900_000)),
    ],
    ids=["prompt", "prediction", "tokens", "lists", "stops", "bias", "detokenize", "tokenize"],
)  # fmt: skip
def test_bystanders_do_not_wait_for_large_bodies(server: Running, path: str, body: str) -> None:
    """Four clients at a time send what `--max-body-bytes` lets through; memory is given back."""
    before, slowest = resident_bytes(), 0.0
    with ThreadPoolExecutor(4) as pool:
        attacks = [pool.submit(server.ask, path, body.encode()) for _ in range(4)]
        while not all(attack.done() for attack in attacks):
            begin = time.process_time()  # of this process, the server's and the clients'
            assert server.ask(COMPLETE, BODIES[COMPLETE])[0] == 200
            slowest = max(slowest, time.process_time() - begin)
    assert {attack.result()[0] for attack in attacks} <= {200, 400}
    print(f"slowest {slowest:.2f} s, {(resident_bytes() - before) >> 20} MiB")
    assert slowest < 1 * SLOWNESS
    assert resident_bytes() - before < 300 << 20


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"prompt": [%s1]}' % ("1," * (1 << 20)), "the body has 1048577 values, expected at most 1048576"),
        ('{"prompt": [%s1]}' % ("[]," * (1 << 16)), "the body has 65538 arrays and objects, expected at most 65536"),
        ('{"prompt": "%s"}' % (r"[,\"\\" * (1 << 18)), "prompt has 1048576 characters, expected at most 32768 (max_len tokens)"),
    ],
    ids=["values", "arrays", "text"],
)  # fmt: skip
def test_values_of_a_body_are_counted_before_they_are_parsed(server: Running, body: str, message: str) -> None:
    assert server.error(COMPLETE, body.encode())[:2] == (400, message)
