"""The server, with OpenAI's own client: texts equal the engine's, and unsupported fields are refused by name."""

from __future__ import annotations

import argparse
import gc
import http.client
import importlib.util
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from pydantic import BaseModel
from tokenizers import AddedToken
from transformers import GenerationConfig

from specdec_kernels import _C, cli
from specdec_kernels.cli import engine_flags
from specdec_kernels.cli.serve import sampling_defaults
from specdec_kernels.engine import AsyncEngine, Engine, SamplingParams
from specdec_kernels.engine.text.detokenizer import Detokenizer
from specdec_kernels.server import Settings, make_app, serving_process
from specdec_kernels.server.text import TextStream, TokenText, configuration_of, token_texts
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering
from support.held_schemas import HELD, TOGETHER
from support.leaks import expect_nothing_left
from support.observed_rounds import wrap_method
from support.random_checkpoints import save_random_model
from support.request_engines import DRAFTS, make_engine, prompts
from support.schema_requests import by_engine, by_server, check_pairs, requests_for
from support.scripted import scripted
from support.server_thread import NAME, Running, serving, start, wait_for
from support.tiny_checkpoint import tokenizer

TEXT = "def area("
CALL = 'I say:<tool_call>\n{"name": "area", "arguments": {"width": 3}}\n</tool_call>\n'
AREA: dict[str, Any] = {
    "type": "function",
    "function": {"name": "area", "description": "of a square", "parameters": {}},
}
NO_TOOLS = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
LONG = 100_000


def messages(text: str = TEXT) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = make_engine("chain", max_len=1024, num_slots=4, adaptive=False, prefix_cache=True)  # the command's default
    with serving(engine, max_queued=4, max_n=3) as running:
        yield running


# --- texts


@pytest.mark.parametrize(("name", "stream"), covering(DRAFTS, [False, True]))
def test_completion_texts_equal_the_engine(name: str, stream: bool) -> None:
    """Greedy and sampled, with every draft, speculation on and off."""
    ways = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95, "seed": 7, "extra_body": {"top_k": 50, "min_p": 0.01}},
    ]
    params = [SamplingParams(30), SamplingParams(30, temperature=0.9, top_p=0.95, seed=7, top_k=50, min_p=0.01)]
    engine = make_engine(name, adaptive=False)
    want = [engine.generate(prompts()[3], one)[0] for one in params]
    with serving(engine) as running, running.client() as client:
        for way, output in zip(ways, want, strict=True):
            for speculation in ("on", "off", 3):
                extra = way.get("extra_body", {}) | {"speculation": speculation}
                got: Any = client.completions.create(
                    model=NAME, prompt=prompts()[3], max_tokens=30, stream=stream, **way | {"extra_body": extra}
                )
                if stream:
                    chunks = list(got)
                    assert "".join(chunk.choices[0].text for chunk in chunks) == output.text
                    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
                    assert reasons == [None] * (len(reasons) - 1) + ["length"]
                else:
                    assert (got.choices[0].text, got.choices[0].finish_reason) == (output.text, "length")
                    assert got.object == "text_completion" and got.model == NAME
        running.wait_until_idle()
        expect_nothing_left(engine)


def test_chat_uses_template_and_reports_usage(server: Running, client: OpenAI) -> None:
    """Whole and streamed answers."""
    (want,) = server.engine.generate(TEXT + "\n", SamplingParams(40))
    got = client.chat.completions.create(model=NAME, messages=messages(), max_completion_tokens=40)
    assert (got.choices[0].message.role, got.choices[0].message.content) == ("assistant", want.text)
    assert got.choices[0].finish_reason == "length" and got.object == "chat.completion"
    stats = want.stats
    assert got.usage is not None
    assert got.usage.to_dict() == {
        "prompt_tokens": len(want.prompt_tokens),
        "completion_tokens": 40,
        "total_tokens": len(want.prompt_tokens) + 40,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
            "reasoning_tokens": 0,
        },
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    info = got.choices[0].to_dict()["meta_info"]
    assert info == {
        "spec_accept_length": stats.accept_length,
        "spec_accept_token_num": stats.accepted,
        "spec_draft_token_num": stats.drafted,
        "spec_verify_ct": stats.rounds,
    }
    assert stats.accepted > 0, "nothing was speculated"

    stream = client.chat.completions.create(
        model=NAME, messages=messages(), max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert len(chunks) < 40, "several tokens come together"
    assert not last.choices and last.usage == got.usage and all(chunk.usage is None for chunk in chunks)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(
            model=NAME, messages=messages(), max_tokens=40, stream=True, stream_options=options
        )
        if chunk.usage is not None
    ]
    assert counts == sorted(counts) and counts[-2:] == [40, 40]


def test_stream_sends_tokens_as_they_come(server: Running, client: OpenAI) -> None:
    """All tokens of one round arrive in one event."""
    (want,) = server.engine.generate(TEXT, SamplingParams(400, ignore_eos=True))
    stream = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == want.text and 3 < sum(map(bool, texts)) <= 1 + want.stats.rounds


def test_chat_accepts_content_in_parts(server: Running, client: OpenAI) -> None:
    (want,) = server.engine.generate("import os\nimport re\n", SamplingParams(8))
    parts: list[Any] = [{"type": "text", "text": "import os"}, {"type": "text", "text": "import re"}]
    got = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}], max_tokens=8)
    assert got.choices[0].message.content == want.text


def test_completion_of_several_prompts_and_choices(server: Running, client: OpenAI) -> None:
    """The choices of a prompt have consecutive seeds; the prompt's tokens count once."""
    texts = ["import os\n", "def area("]
    params = [SamplingParams(12, temperature=1.0, seed=seed) for seed in (5, 6, 7)]
    want = [output.text for text in texts for output in server.engine.generate([text] * 3, params)]
    given: dict[str, Any] = {"model": NAME, "prompt": texts, "max_tokens": 12, "temperature": 1, "seed": 5, "n": 3}
    got = client.completions.create(**given)
    assert [choice.text for choice in got.choices] == want and len(set(want)) == 6
    assert [choice.index for choice in got.choices] == list(range(6))
    assert got.usage is not None
    assert got.usage.prompt_tokens == sum(len(tokenizer()(text)["input_ids"]) for text in texts)
    assert got.usage.completion_tokens == 72
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == want
    again = [
        client.completions.create(**given | {"prompt": texts[0], "n": 1, "seed": s}).choices[0].text for s in (5, 6)
    ]
    assert again == want[:2]


def test_server_prefills_shared_prefixes_once(server: Running, client: OpenAI) -> None:
    """Choices of one prompt and continuations of its text share rows, in usage and in metrics."""
    rows: list[int] = []

    def count(prefill: Callable[..., None], chunks: list[_C.PrefillChunk]) -> None:
        rows.extend(len(chunk.tokens) - 1 for chunk in chunks)
        prefill(chunks)

    prompt = prompts()[3]
    given: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 1, "seed": 5, "n": 3}
    want = [make_engine("none").generate([prompt], SamplingParams(12, temperature=1.0, seed=s))[0] for s in (5, 6, 7)]
    server.engine.clear_cache()
    before = samples(server)
    restore = wrap_method(server.engine.core.executor, "prefill", count)
    try:
        first = client.completions.create(**given)
        assert [choice.text for choice in first.choices] == [output.text for output in want]
        most = (len(prompt) - 1) // 8 * 8
        assert sum(rows) == len(prompt) + 2 * (len(prompt) - most)
        assert first.usage is not None and first.usage.prompt_tokens_details is not None
        assert first.usage.prompt_tokens_details.cached_tokens == 0, "the prompt counts once, as it was prefilled"
        rows.clear()
        turn = given | {"prompt": [*prompt, 5, 6, 7], "n": 1, "max_tokens": 2}
        *_, last = client.completions.create(**turn, stream=True, stream_options={"include_usage": True})
        assert last.usage is not None and last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == most and sum(rows) == len(prompt) + 3 - most
    finally:
        restore()
    server.wait_until_idle()
    after = samples(server)
    gained = {name: after[name] - before[name] for name in before}
    assert gained['vllm:prefix_cache_queries_total{model_name="tiny"}'] == 4 * len(prompt) + 3
    assert gained['vllm:prefix_cache_hits_total{model_name="tiny"}'] == 3 * most
    assert gained['specdec:engine_prefix_hits_total{model_name="tiny"}'] == 3
    assert after['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0 < after['specdec:cached_pages{model_name="tiny"}']
    expect_nothing_left(server.engine)


@pytest.mark.parametrize("stop", ["self", ["):", "\n\n", "zzz"], ["= ", "_test(self, y):\n   "], "x = y\n\n    d"])
def test_stop_strings_cut_text_exactly(server: Running, client: OpenAI, stop: str | list[str]) -> None:
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def "
    (want,) = server.engine.generate(prompt, SamplingParams(60, stop=stop))
    whole = client.completions.create(model=NAME, prompt=prompt, max_tokens=60, stop=stop)
    assert want.text is not None and not any(one in want.text for one in ([stop] if isinstance(stop, str) else stop))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (want.text, "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == len(want.tokens)
    stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=60, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == want.text


def test_stop_tokens_end_text(server: Running, client: OpenAI) -> None:
    """They end it in addition to the model's own; they count as tokens and are not in the text."""
    (free,) = server.engine.generate(TEXT, SamplingParams(20))
    stop = free.tokens[8]
    (want,) = server.engine.generate(TEXT, SamplingParams(20, stop_token_ids=[stop]))
    got = client.completions.create(model=NAME, prompt=TEXT, max_tokens=20, extra_body={"stop_token_ids": [stop]})
    assert (got.choices[0].text, got.choices[0].finish_reason) == (want.text, "stop")
    assert got.usage is not None and got.usage.completion_tokens == len(want.tokens)
    got = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=20, extra_body={"stop_token_ids": [stop], "min_tokens": 15}
    )
    assert got.usage is not None and got.usage.completion_tokens >= 15


def test_completion_with_penalties_and_biases(server: Running, client: OpenAI) -> None:
    (plain,) = server.engine.generate(TEXT, SamplingParams(30))
    biases = {plain.tokens[0]: -100.0, plain.tokens[3]: 5.0}
    params = SamplingParams(30, presence_penalty=0.5, frequency_penalty=1.5, repetition_penalty=1.2, logit_bias=biases)
    (want,) = server.engine.generate(TEXT, params)
    got = client.completions.create(
        model=NAME,
        prompt=TEXT,
        max_tokens=30,
        presence_penalty=0.5,
        frequency_penalty=1.5,
        logit_bias={str(token): int(value) for token, value in biases.items()},
        extra_body={"repetition_penalty": 1.2},
    )
    assert got.choices[0].text == want.text != plain.text


def test_chat_runs_to_end_of_context(server: Running, client: OpenAI) -> None:
    prompt = list(range(1, 1001))
    got = client.completions.create(model=NAME, prompt=prompt, max_tokens=LONG, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert (got.usage.total_tokens, got.choices[0].finish_reason) == (1024, "length")


def token_text(token: int) -> TokenText:
    return token_texts(Detokenizer(tokenizer()))(token)


def test_completion_and_chat_return_logprobs(server: Running, client: OpenAI) -> None:
    (want,) = server.engine.generate(TEXT + "\n", SamplingParams(12, logprobs=3))
    assert want.logprobs is not None
    text_of = token_texts(Detokenizer(tokenizer()))
    given: dict[str, Any] = {
        "model": NAME,
        "messages": messages(),
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**given).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [entry.logprob for entry in whole.content] == [one.logprob for one in want.logprobs]
    assert "".join(entry.token for entry in whole.content) == want.text
    for entry, one in zip(whole.content, want.logprobs, strict=True):
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [(text_of(t).text, p) for t, p in one.top]
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**given, stream=True)]
    assert [entry for some in streamed if some for entry in some.content or []] == whole.content
    plain = client.completions.create(model=NAME, prompt=TEXT + "\n", max_tokens=12, logprobs=3).choices[0].logprobs
    assert plain is not None and plain.tokens is not None
    assert plain.token_logprobs == [one.logprob for one in want.logprobs]
    assert "".join(plain.tokens) == want.text
    assert plain.text_offset == [len("".join(plain.tokens[:i])) for i in range(12)]
    for token, entry, one in zip(want.tokens, plain.top_logprobs, want.logprobs, strict=True):
        assert entry == {text_of(t).key: p for t, p in [*one.top, (token, one.logprob)]}


def test_top_logprobs_tell_parts_of_characters_apart(client: OpenAI) -> None:
    """The prompt has multi-byte characters, and the bias prefers their parts, which decode to the same text alone."""
    prompt = "# 日本語 héllo 🎉 ñandú\n" * 3
    parts = [token for token in range(2048) if "\N{REPLACEMENT CHARACTER}" in token_text(token).text][:60]
    got = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=20, logprobs=5, logit_bias={str(token): 20 for token in parts}
    )
    logprobs = got.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs and logprobs.token_logprobs
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value and len(top) in (5, 6)


def test_stream_never_splits_a_character(server: Running, client: OpenAI) -> None:
    """The prompt has multi-byte characters; the temperature lets any byte follow any other."""
    prompt = "# 日本語 héllo 🎉 ñandú\n" * 3
    for seed in range(5):
        given: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 60, "temperature": 1.4, "seed": seed}
        whole = client.completions.create(**given).choices[0].text
        deltas = [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True)]
        assert "".join(deltas) == whole and whole.encode()


def test_stream_reports_drafted_text_by_round(server: Running, client: OpenAI) -> None:
    """The pieces' accepted counts equal those of the usage."""
    options: Any = {"include_usage": True, "include_rounds": True}
    prompt = "x = [1, 2, 3]\n" * 4
    *chunks, last = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=40, stream=True, stream_options=options
    )
    choices: list[Any] = [chunk.choices[0].to_dict() for chunk in chunks]
    pieces = [piece for choice in choices for piece in choice["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == "".join(choice["text"] for choice in choices)
    rounds = [count for choice in choices for count in choice["rounds"]]
    assert last.usage is not None and last.usage.completion_tokens_details is not None and sum(rounds) == 40
    accepted = last.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted == sum(count - 1 for count in rounds) > 0
    assert len(pieces) == len(rounds) + sum(count > 1 for count in rounds)
    assert [piece["accepted"] for piece in pieces] == [kind for n in rounds for kind in [True] * (n > 1) + [False]]


# --- tools


# Nothing between two messages: the tiny model copies the text before.
COPIES = {"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}


def test_tools_in_hermes_format() -> None:
    prompt = messages(CALL * 6 + "I say:")
    given: dict[str, Any] = {"model": NAME, "messages": prompt, "max_tokens": 50, "stop": "\n{", "tools": [AREA]}
    with serving(make_engine(max_len=512), **COPIES) as running, running.client() as client:
        (choice,) = client.chat.completions.create(**given | {"stop": "</tool_call>\n{"}).choices
        assert choice.message.tool_calls is not None, choice.message.content
        (call,) = choice.message.tool_calls
        assert call.type == "function" and (call.function.name, call.function.arguments) == ("area", '{"width": 3}')
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and call.id.startswith("call_")
        stream = client.chat.completions.create(**given | {"stop": "</tool_call>\n{"}, stream=True)
        deltas = [chunk.choices[0] for chunk in stream]
        (streamed,) = [one for delta in deltas for one in delta.delta.tool_calls or []]
        assert streamed.function is not None
        assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "area", '{"width": 3}')
        assert deltas[-1].finish_reason == "tool_calls" and not any(delta.delta.content for delta in deltas)
        (plain,) = client.chat.completions.create(**given, tool_choice="none").choices
        assert plain.message.tool_calls is None and plain.message.content == "<tool_call>"
        answer: list[Any] = [choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "9"}]
        (after,) = client.chat.completions.create(**given | {"messages": [*prompt, *answer]}).choices
        assert after.message.content is not None


def test_tools_in_llama_format() -> None:
    text = '{"name": "area", "parameters": {"width": 3}}\n'
    given: dict[str, Any] = {"model": NAME, "messages": messages(text * 4), "max_tokens": 40, "tools": [AREA]}
    with serving(make_engine(max_len=512), tool_parser="llama3", **COPIES) as running, running.client() as client:
        (choice,) = client.chat.completions.create(**given, stop="}}\n").choices
        assert choice.message.tool_calls is None and choice.message.content == text.removesuffix("}}\n")
        (choice,) = client.chat.completions.create(**given, stop="\n").choices
        assert choice.message.tool_calls is not None, choice.message.content
        assert choice.message.tool_calls[0].to_dict()["function"] == {"name": "area", "arguments": '{"width": 3}'}


# --- reasoning

THOUGHT = "<think>\nI add up.\n</think>\n\n"
REASONS = {"chat_template": "{{ messages[-1]['content'] }}{# <think> #}"}


@pytest.fixture(scope="module")
def reasoner() -> Iterator[Running]:
    """Yield a server of a model whose template knows of reasoning."""
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    with serving(make_engine(max_len=512, grammars=True, adaptive=False), **REASONS) as running:
        yield running


def reasoned(running: Running, text: str, **given: Any) -> tuple[list[Any], int]:
    """Return reasoning and content of a scripted answer, whole and streamed, and the number of reasoning tokens."""
    given = {"model": NAME, "messages": messages(), "max_tokens": 100, "logprobs": True} | given
    with scripted(running, text), running.client() as client:
        whole = client.chat.completions.create(**given)
        *chunks, last = client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    message: Any = whole.choices[0].message
    names = ("reasoning_content", "reasoning", "content")
    got = [getattr(message, name, None) for name in names]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert ["".join(getattr(delta, name, None) or "" for delta in deltas) for name in names] == [
        one or "" for one in got
    ]
    assert got[0] == got[1] and whole.usage is not None and last.usage is not None
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    details: Any = whole.usage.completion_tokens_details
    assert details.reasoning_tokens == last.usage.completion_tokens_details.reasoning_tokens
    texts = list(accumulate(entry.token for entry in whole.choices[0].logprobs.content))
    count = sum("</think>" not in before for before in ["", *texts[:-1]]) if got[0] is not None else 0
    assert details.reasoning_tokens == count or given.get("extra_body")
    return got[1:], details.reasoning_tokens


def test_reasoning_is_apart_from_the_answer(reasoner: Running) -> None:
    got, count = reasoned(reasoner, THOUGHT + "It is 4.")
    assert got == ["I add up.", "It is 4."] and count > 0
    assert reasoned(reasoner, "It is 4.") == ([None, "It is 4."], 0)
    (reasoning, content), count = reasoned(reasoner, THOUGHT + "It is 4.", max_tokens=14)
    assert THOUGHT.startswith(f"<think>\n{reasoning}") and not content and count == 14
    assert reasoned(reasoner, THOUGHT + "It is 4.", stop="4.")[0] == ["I add up.", "It is "]
    assert reasoned(reasoner, THOUGHT + "It is 4.", stop="up")[0] == ["I add ", ""]
    begun: Any = messages("2 + 2? <think>\n")
    assert reasoned(reasoner, "I add up.</think>4", messages=begun)[0] == ["I add up.", "4"]
    assert reasoned(reasoner, "4", messages=messages("<think></think>"))[0] == [None, "4"]
    reasoner.wait_until_idle()


def test_reasoning_may_be_left_out_or_in_the_text(reasoner: Running) -> None:
    got, count = reasoned(reasoner, THOUGHT + "4", extra_body={"include_reasoning": False})
    assert got == [None, "4"] and count > 0
    assert reasoned(reasoner, THOUGHT + "4", extra_body={"separate_reasoning": False}) == ([None, THOUGHT + "4"], 0)


def test_call_after_reasoning_is_made_and_one_within_is_not(reasoner: Running) -> None:
    call = CALL.removeprefix("I say:").strip()
    with scripted(reasoner, f"<think>{call}</think>{call}"), reasoner.client() as client:
        (choice,) = client.chat.completions.create(
            model=NAME, messages=messages(), max_tokens=200, tools=[AREA]
        ).choices
    message: Any = choice.message
    assert (message.reasoning_content, message.content, choice.finish_reason) == (call, None, "tool_calls")
    assert [call.function.arguments for call in message.tool_calls] == ['{"width": 3}']


def test_reasoning_parser_none_leaves_reasoning_in_the_text() -> None:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    with serving(make_engine(max_len=512, grammars=True), reasoning_parser="none", **REASONS) as running:
        assert reasoned(running, THOUGHT + "4") == ([None, THOUGHT + "4"], 0)


def test_constrained_text_of_a_reasoning_model_is_its_answer(reasoner: Running) -> None:
    """The constraint holds from the first token, so that no end of the prompt's reasoning can come."""
    given: dict[str, Any] = {"messages": messages("<think>"), "extra_body": {"regex": "[ab]{3}"}}
    (reasoning, content), count = reasoned(reasoner, "", **given)
    assert (reasoning, count) == (None, 0) and re.fullmatch("[ab]{3}", content)


def test_template_gets_reasoning_of_earlier_answers() -> None:
    """By both of its names."""
    template = "{% for m in messages %}{{ m['reasoning_content'] }}|{% endfor %}"
    with serving(make_engine(), chat_template=template) as running:
        answers = [{"role": "assistant", name: "a"} for name in ("reasoning_content", "reasoning")]
        tokens = json.loads(running.ask("/tokenize", {"messages": answers})[2])["tokens"]
        assert tokenizer().decode(tokens) == "a|a|"


SCHEMA = {
    "type": "object",
    "properties": {"width": {"type": "integer"}, "name": {"enum": ["square", "circle"]}},
    "required": ["width", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """Yield a server whose engine supports grammars and predictions."""
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    with serving(make_engine("union", max_len=512, adaptive=False, grammars=True)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0, 1])
def test_response_format_constrains_text(strict: Running, temperature: float) -> None:
    given: dict[str, Any] = {"model": NAME, "messages": messages(), "temperature": temperature, "seed": 4}
    form: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
    params = SamplingParams(300, temperature=temperature, seed=4, json_schema=SCHEMA)
    (want,) = strict.engine.generate(TEXT + "\n", params)
    with strict.client() as client:
        for speculation in ("on", "off"):
            extra = {"speculation": speculation}
            got = client.chat.completions.create(**given, response_format=form, max_tokens=300, extra_body=extra)
            text = got.choices[0].message.content
            assert text == want.text and got.choices[0].finish_reason == "stop"
            value = json.loads(text or "")
            assert value.keys() == {"width", "name"} and isinstance(value["width"], int)
        stream = client.chat.completions.create(**given, response_format=form, max_tokens=300, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want.text
        got = client.chat.completions.create(**given, response_format={"type": "json_object"}, max_tokens=200)
        content = got.choices[0].message.content or ""
        assert content.startswith("{")
        if got.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(content), dict)
        plain: dict[str, Any] = {"model": NAME, "prompt": TEXT, "temperature": temperature, "max_tokens": 40}
        text = (
            client.completions.create(**plain | {"max_tokens": 200}, extra_body={"response_format": form})
            .choices[0]
            .text
        )
        assert json.loads(text).keys() == {"width", "name"}
        text = client.completions.create(**plain, extra_body={"regex": "[ab]{3}c"}).choices[0].text
        assert re.fullmatch("[ab]{3}c", text)
        text = client.completions.create(**plain, extra_body={"ebnf": 'root ::= "yes" | "no"'}).choices[0].text
        assert text in ("yes", "no")
    strict.wait_until_idle()


def test_forced_tool_choice_calls_tool(strict: Running) -> None:
    """The named tool or any tool; streamed too."""
    draw: dict[str, Any] = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
    turn: dict[str, Any] = {"type": "function", "function": {"name": "turn", "parameters": SCHEMA}}
    given: dict[str, Any] = {"model": NAME, "messages": messages(), "max_tokens": 300, "tools": [draw, turn]}
    with strict.client() as client:
        for choice, names in (
            ({"type": "function", "function": {"name": "turn"}}, {"turn"}),
            ("required", {"draw", "turn"}),
        ):
            (whole,) = client.chat.completions.create(**given, tool_choice=choice).choices
            assert whole.message.tool_calls is not None and whole.finish_reason == "tool_calls"
            function: Any = whole.message.tool_calls[0].to_dict()["function"]
            assert function["name"] in names
            assert json.loads(function["arguments"]).keys() == {"width", "name"}
            chunks = list(client.chat.completions.create(**given, tool_choice=choice, stream=True))
            (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert call.function is not None and call.function.arguments == function["arguments"]
        cut = client.chat.completions.create(**given | {"max_tokens": 3}, tool_choice="required").choices[0]
        assert cut.finish_reason == "length" and cut.message.content and not cut.message.tool_calls
    strict.wait_until_idle()


def test_forced_call_of_parameters_that_may_be_no_object_has_an_object(strict: Running) -> None:
    def body(parameters: dict[str, Any]) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "draw", "parameters": parameters}}
        return {"model": NAME, "messages": messages(), "tools": [tool], "tool_choice": "required", "max_tokens": 100}

    for parameters in ({"type": ["null", "object"], "maxProperties": 0}, {"anyOf": [{"type": "null"}, CLOSED]}):
        status, _, data = strict.ask(CHAT, body(parameters))
        assert status == 200, data
        (choice,) = json.loads(data)["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert strict.error(CHAT, body({"type": "string"})) == (
        400,
        'tools has parameters of the type "string", expected "object" ("draw" is called with an object)',
        "tools",
    )
    strict.wait_until_idle()


def test_texts_of_every_row_of_keywords_are_valid_and_the_same(strict: Running) -> None:
    """By the engine, `response_format` and forced calls; tests/server/test_schema_texts.py asks for fifty of each."""
    rows = [[schema for schema in row if schema is not True][:1] for row in (*HELD.values(), TOGETHER)]
    requests = [one for row in rows for schema in row for one in requests_for(schema, [2])]
    calls = [one.as_call() for one in requests]
    plain, plain_calls = (by_engine(strict.engine, each, speculation="off") for each in (requests, calls))
    print(f"\nengine: {check_pairs(requests, plain, by_engine(strict.engine, requests))}")
    print(f"response_format: {check_pairs(requests, plain, by_server(strict, requests))}")
    print(f"forced call: {check_pairs(calls, plain_calls, by_server(strict, calls))}")
    strict.wait_until_idle()


class Corner(BaseModel):
    x: Literal["left", "right"]


class Shape(BaseModel):
    corner: Corner
    other: Corner | None


CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
SIDE = {**CLOSED, "properties": {"x": {"enum": ["up", "down"]}}, "required": ["x"]}
SELF_REFERENCES: dict[str, dict[str, Any]] = {
    "$defs": {"properties": {"a": {"$ref": "#/$defs/Corner"}}, "required": ["a"], "$defs": {"Corner": SIDE}},
    "definitions": {"properties": {"a": {"$ref": "#/definitions/a~1b"}}, "required": ["a"], "definitions": {"a/b": SIDE}},
    "properties": {"properties": {"y": SIDE, "z": {"$ref": "#/properties/y"}}, "required": ["y", "z"]},
    "whole": {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"enum": [1, 2]}]}, "b": {"const": 3}}, "required": ["a", "b"]},
    "data": {"properties": {"$ref": {"enum": [{"$ref": "#/$defs/a"}]}}, "required": ["$ref"]},
}  # fmt: skip


@pytest.mark.parametrize("name", SELF_REFERENCES)
def test_forced_call_of_parameters_that_refer_to_themselves_is_valid(strict: Running, name: str) -> None:
    """Next to a tool whose definitions have the same names."""
    parameters = CLOSED | SELF_REFERENCES[name]
    nested: Any = openai.pydantic_function_tool(Shape, name="nested")
    tools = [nested, {"type": "function", "function": {"name": "own", "parameters": parameters}}]
    schemas = {"nested": nested["function"]["parameters"], "own": parameters}
    with strict.client() as client:
        for choice in ("nested", "own", None):
            forced: Any = {"type": "function", "function": {"name": choice}} if choice else "required"
            (one,) = client.chat.completions.create(
                model=NAME, messages=messages(), max_tokens=400, temperature=1, seed=3, tools=tools, tool_choice=forced
            ).choices
            assert one.finish_reason == "tool_calls" and one.message.tool_calls is not None
            function: Any = one.message.tool_calls[0].to_dict()["function"]
            assert choice in (None, function["name"])
            Draft202012Validator(schemas[function["name"]]).validate(json.loads(function["arguments"]))
    strict.wait_until_idle()


def test_prediction_keeps_text(strict: Running) -> None:
    """The text is the same."""
    text = strict.engine.generate(TEXT + "\n", SamplingParams(60))[0].text or ""
    given: dict[str, Any] = {"model": NAME, "messages": messages(), "max_tokens": 60, "seed": 1}
    with strict.client() as client:
        for content in (text, [{"type": "text", "text": text}]):
            prediction: Any = {"type": "content", "content": content}
            got = client.chat.completions.create(**given, prediction=prediction)
            assert got.choices[0].message.content == text
            assert got.usage is not None and got.usage.completion_tokens_details is not None
            assert got.usage.completion_tokens_details.accepted_prediction_tokens
    strict.wait_until_idle()


def test_grammar_error_messages(strict: Running, server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    status, message, param = strict.error(CHAT, {"messages": messages(), "response_format": form})
    assert (status, param) == (400, "response_format") and message.startswith(
        'response_format has type "nothing" at #, expected one of '
    )
    for fields, name in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [AREA], "tool_choice": "required"}, "tool_choice"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": "a"}, "ebnf"),
    ):
        got = server.error(CHAT, {"messages": messages()} | fields)
        assert got == (400, f"{name} is given, expected none without Engine(grammars=True)", name)
    prediction = {"type": "content", "content": "a"}  # a hint, which a draft without n-grams ignores
    assert server.ask(CHAT, {"messages": messages(), "prediction": prediction, "max_tokens": 1})[0] == 200


# --- text


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_stream_holds_incomplete_characters(size: int) -> None:
    text = "a héllo 日本語 🎉 end"
    tokens = tokenizer()(text)["input_ids"]
    stream = TextStream(Detokenizer(tokenizer()).decoder([]), [])
    sent = []
    for at in range(0, len(tokens), size):
        stream.push(tokens[at : at + size])
        sent += stream.take()
    assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in sent)
    assert "".join(piece.text for piece in [*sent, *stream.finish(text)]) == text


def test_text_stream_holds_possible_stop_strings() -> None:
    tokens = tokenizer()("one two three")["input_ids"]
    stream = TextStream(Detokenizer(tokenizer()).decoder([]), ["abcde", "x"])
    stream.push(tokens[:-1], accepted=True)
    stream.push(tokens[-1:])
    assert "".join(piece.text for piece in stream.take()) == "one two t"
    assert "".join(piece.text for piece in stream.take()) == ""
    assert "".join(piece.text for piece in stream.finish("one two th")) == "h"


def test_token_bytes_of_tokenizers() -> None:
    of = token_texts(Detokenizer(tokenizer()))
    for text in ("def area(x):\n", "日本語 🎉", "  é"):
        tokens = tokenizer()(text)["input_ids"]
        assert bytes(byte for token in tokens for byte in of(token).bytes).decode() == text
    assert of(0) == ("<|endoftext|>", list(b"<|endoftext|>"))


# --- refusals

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (CHAT, {"temperature": -1}, "temperature is -1, expected a number from 0 (greedy) on", "temperature"),
        (CHAT, {"temperature": "hot"}, 'temperature is "hot", expected a number', "temperature"),
        (CHAT, {"temperature": True}, "temperature is true, expected a number", "temperature"),
        (CHAT, {"top_p": 0}, "top_p is 0, expected above 0 and at most 1", "top_p"),
        (CHAT, {"top_k": 1.5}, "top_k is 1.5, expected an integer", "top_k"),
        (CHAT, {"min_p": 2}, "min_p is 2, expected 0 to 1", "min_p"),
        (CHAT, {"seed": 2**63}, "seed is 9223372036854775808, expected 64 bits with a sign, or None", "seed"),
        (CHAT, {"presence_penalty": "a"}, 'presence_penalty is "a", expected a number', "presence_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty is 0, expected a finite number of 32 bits above 0", "repetition_penalty"),
        (CHAT, {"logit_bias": {"a": 1}}, 'logit_bias has "a": 1, expected token ids with a number each', "logit_bias"),
        (CHAT, {"logit_bias": {"5": None}}, 'logit_bias has "5": null, expected token ids with a number each', "logit_bias"),
        (CHAT, {"logit_bias": {"2048": 1}}, "logit_bias has token 2048, expected 0 to 2047 (the model's vocabulary)", "logit_bias"),
        (CHAT, {"stop": [1]}, "stop is [1], expected a string or a list of strings", "stop"),
        (CHAT, {"stop": ""}, "stop is , expected strings that are not empty", "stop"),
        (CHAT, {"stop_token_ids": list(range(17))}, "stop_token_ids has 18 entries, expected at most 16", "stop_token_ids"),
        (CHAT, {"n": 4}, "n is 4, expected 1 to 3", "n"),
        (CHAT, {"n": 0}, "n is 0, expected 1 to 3", "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens is 0, expected at least 1", "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0, expected at least 1", "max_completion_tokens"),
        (CHAT, {"min_tokens": 9, "max_tokens": 4}, "min_tokens is 9, expected 0 to max_tokens", "min_tokens"),
        (CHAT, {"stream": "yes"}, 'stream is "yes", expected true or false', "stream"),
        (CHAT, {"stream_options": {"every": 1}}, "stream_options.every is 1, expected none (this field is not supported)", "stream_options.every"),
        (CHAT, {"stream_options": {"include_rounds": True}, "tools": [AREA]}, "stream_options.include_rounds is true, expected false with tools", "stream_options.include_rounds"),
        (CHAT, {"logprobs": 3}, "logprobs is 3, expected true or false", "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21, expected 0 to 20", "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs is 2, expected logprobs true with it", "top_logprobs"),
        (CHAT, {"speculation": "maybe"}, 'speculation is "maybe", expected "on", "off" or a number of nodes', "speculation"),
        (CHAT, {"speculation": 0}, "speculation is 0, expected 'on', 'off' or a number of nodes from 1 on", "speculation"),
        (CHAT, {"priority": 2**31}, "priority is 2147483648, expected -2147483648 to 2147483647", "priority"),
        (CHAT, {"priority": "high"}, 'priority is "high", expected an integer', "priority"),
        (CHAT, {"timeout": 0}, "timeout is 0, expected seconds above 0, or None", "timeout"),
        (CHAT, {"timeout": "5s"}, 'timeout is "5s", expected a number', "timeout"),
        (CHAT, {"model": "gpt-5"}, 'model is "gpt-5", expected "tiny"', "model"),
        (CHAT, {"messages": []}, "messages is [], expected at least 1 message", "messages"),
        (CHAT, {"messages": None}, "messages is missing, expected a list", "messages"),
        (CHAT, {"messages": ["hello"]}, 'messages[0] is "hello", expected an object', "messages"),
        (CHAT, {"messages": [{"content": "hello"}]}, "messages[0].role is missing, expected a string", "messages"),
        (CHAT, {"messages": [None]}, "messages[0] is null, expected an object", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, expected a string or a list of parts", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'messages[0].content[0] is {"type": "image_url"}, expected {"type": "text", "text": ...}', "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 2000}]}, "messages has 2002 tokens, expected at most 1023 (max_len - 1)", "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0] is 3, expected a function with its name", "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]}, 'messages[0].tool_calls[0] is {"function": {"name": "f", "arguments": "x"}}, expected arguments that are an object as JSON', "messages"),
        (CHAT, {"tools": [{"type": "web_search"}]}, 'tools[0] is {"type": "web_search"}, expected {"type": "function", "function": {"name": ...}}', "tools"),
        (CHAT, {"tools": [AREA | {"function": AREA["function"] | {"parameters": "int"}}]}, 'tools[0].function.parameters is "int", expected an object', "tools"),
        (CHAT, {"tools": [AREA | {"function": {"name": "f", "description": 5}}]}, "tools[0].function.description is 5, expected a string", "tools"),
        (CHAT, {"tools": [AREA | {"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict is 1, expected true or false", "tools"),
        (CHAT, {"tools": [AREA], "tool_choice": NO_TOOLS}, f'tool_choice is {json.dumps(NO_TOOLS)[:57]}..., expected one of tools, which are ["area"]', "tool_choice"),
        (CHAT, {"tools": [AREA], "parallel_tool_calls": 0}, "parallel_tool_calls is 0, expected true or false", "parallel_tool_calls"),
        (CHAT, {"tools": [AREA], "tool_choice": "any"}, 'tool_choice is "any", expected "auto", "none", "required" or {"type": "function", "function": {"name": ...}}', "tool_choice"),
        (CHAT, {"tool_choice": "required"}, 'tool_choice is "required", expected one of tools, which are []', "tool_choice"),
        (CHAT, {"tools": [AREA], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 'tool_choice is {"type": "function", "function": {"name": "f"}}, expected one of tools, which are ["area"]', "tool_choice"),
        (CHAT, {"tools": [AREA], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format is given, expected none with a forced tool_choice", "response_format"),
        (CHAT, {"response_format": {"type": "yaml"}}, 'response_format.type is "yaml", expected "text" or "json_object" or "json_schema"', "response_format.type"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "a"}}}, 'response_format.json_schema is {"name": "a"}, expected none (this field is not supported)', "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing, expected an object", "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema is missing, expected an object", "response_format.json_schema.schema"),
        (CHAT, {"regex": "a", "ebnf": "b"}, "ebnf is given, expected none with regex", "ebnf"),
        (CHAT, {"prediction": "text"}, 'prediction is "text", expected an object', "prediction"),
        (CHAT, {"prediction": {"type": "content", "content": [1]}}, 'prediction.content[0] is 1, expected {"type": "text", "text": ...}', "prediction.content"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction.content is missing, expected a string or a list of parts", "prediction.content"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize is false, expected none", "chat_template_kwargs.tokenize"),
        (CHAT, {"chat_template": "{{ messages }}"}, 'chat_template is "{{ messages }}", expected none (this field is not supported)', "chat_template"),
        (CHAT, {"audio": {}}, "audio is {}, expected none (this field is not supported)", "audio"),
        (CHAT, {"modalities": ["audio"]}, 'modalities is ["audio"], expected none (this field is not supported)', "modalities"),
        (CHAT, {"top_k": True}, "top_k is true, expected an integer", "top_k"),
        (CHAT, {"functions": [1]}, "functions is [1], expected none (this field is not supported)", "functions"),
        (CHAT, {"": 1}, '"" is 1, expected none (this field is not supported)', '""'),
        (CHAT, {"x" * 99: 1}, f'"{"x" * 56}... is 1, expected none (this field is not supported)', f'"{"x" * 56}...'),
        (COMPLETIONS, {"prompt": None}, "prompt is missing, expected a string, a list of token ids, or a list of either", "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt is [], expected a string, a list of token ids, or a list of either", "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt is empty, expected at least 1 token", "prompt"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt[1] is 3, expected a string or a list of token ids", "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 'prompt is [1, "a"], expected a string or a list of token ids', "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2048]]}, "prompt[1] has token 2048, expected 0 to 2047 (the model's vocabulary)", "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 3, "n": 3}, "prompt and n ask for 9 texts, expected at most 8", "n"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs is 21, expected 0 to 20", "logprobs"),
        (COMPLETIONS, {"best_of": 2}, "best_of is 2, expected none, 1 or n", "best_of"),
        (COMPLETIONS, {"suffix": "end"}, 'suffix is "end", expected none (this field is not supported)', "suffix"),
        (COMPLETIONS, {"tools": [AREA]}, f"tools is {json.dumps([AREA])[:57]}..., expected none (this field is not supported)", "tools"),
    ],
)  # fmt: skip
def test_server_refuses_bad_fields_by_name(
    server: Running, path: str, fields: dict[str, Any], message: str, param: str
) -> None:
    body = {"messages": messages()} if path == CHAT else {"prompt": TEXT}
    assert server.error(path, body | fields) == (404 if param == "model" else 400, message, param)
    assert server.app.state.server.metrics.num_open == 0


def test_server_accepts_fields_with_default_values(client: OpenAI) -> None:
    got = client.chat.completions.create(
        model=NAME,
        messages=messages(),
        max_tokens=2,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        user="me",
        metadata={"a": "b"},
        store=True,
        parallel_tool_calls=False,
        tool_choice="auto",
        service_tier="flex",
        function_call="none",
        functions=[],
        extra_body={
            "repetition_penalty": 1.0,
            "top_k": -1,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "detokenize": True,
            "length_penalty": 1.0,
            "add_generation_prompt": True,
            "documents": [],
        },
    )
    assert got.usage is not None and got.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)), expected a JSON object"),
        (b"[1]", "the body is [1], expected a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "the body is no JSON (NaN is no number of JSON), expected a JSON object"),
        (b"\xff\xfe", None),
        (b'{"prompt": "\\ud800"}', None),
        (b"[" * 100_000, "the body has 100000 arrays and objects, expected at most 65536"),
        (b'{"seed": ' + b"1" * 10_000 + b"}", None),
    ],
    ids=["open", "list", "NaN", "no UTF-8", "half a pair", "nested", "long number"],
)  # fmt: skip
def test_server_refuses_bodies_that_are_no_object(server: Running, body: bytes, message: str | None) -> None:
    status, got, param = server.error(COMPLETIONS, body)
    assert (status, param) == (400, None) and got.startswith("the body ") and message in (None, got)


def test_server_reports_errors_of_template() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with serving(make_engine(), chat_template=template) as running:
        message = "messages do not fit the chat template: roles must alternate"
        assert running.error(CHAT, {"messages": messages()}) == (400, message, "messages")


def test_server_refuses_unknown_paths_and_methods(server: Running) -> None:
    assert server.error("/v1/embeddings", {}) == (404, "POST /v1/embeddings: Not Found", None)
    assert server.error(CHAT, None) == (405, f"GET {CHAT}: Method Not Allowed", None)


def test_openai_client_raises_typed_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        client.chat.completions.create(model=NAME, messages=messages(), temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages())


# --- limits


def test_server_requires_api_key(server: Running) -> None:
    with serving(make_engine(), api_key="secret") as running:
        for path, body in (("/v1/models", None), (CHAT, {"messages": messages()}), ("/tokenize", {"prompt": "a"})):
            for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                status, message, _ = running.error(path, body, headers)
                assert status == 401 and message.startswith("the API key is missing or another one")
        for path in ("/health", "/metrics", "/"):
            assert running.ask(path)[0] == 200
        with running.client(api_key="secret") as client:
            assert client.models.list().data[0].id == NAME
        with running.client(api_key="other") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_server_limits_body_and_prompt_size() -> None:
    with serving(make_engine(), max_body_bytes=1000, max_prompt_tokens=20) as running:
        status, message, _ = running.error(COMPLETIONS, b" " * 1001)
        assert (status, message) == (413, "the body has 1001 bytes or more, expected at most 1000")
        with running.connection() as connection:  # without Content-Length
            connection.request("POST", COMPLETIONS, iter([b" " * 600] * 2), encode_chunked=True)
            assert connection.getresponse().status == 413
        long = {"prompt": list(range(1, 22))}
        assert running.error(COMPLETIONS, long) == (400, "the prompt has 21 tokens, expected at most 20", "prompt")


def test_server_with_full_queue_answers_429(server: Running, client: OpenAI) -> None:
    """Four requests run and four wait; the ninth gets 429, and succeeds once there is room."""
    given: dict[str, Any] = {"model": NAME, "prompt": TEXT, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**given, stream=True) for _ in range(3)]
    whole = [client.completions.create(**given, stream=True) for _ in range(1)]
    for stream in (*streams, *whole):
        next(iter(stream))
    with server.connection() as connection:
        body = {"prompt": [TEXT] * 4, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        wait_for(lambda: server.app.state.server.metrics.num_open == 8)
        status, headers, answer = server.ask(COMPLETIONS, {"prompt": TEXT})
        error = json.loads(answer)["error"]
        assert (status, headers["Retry-After"], error["code"]) == (429, "1", "queue_full")
        assert error["message"] == "8 requests are waiting or running, expected fewer: try again later"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=NAME, prompt=TEXT)
        for stream in (*streams, *whole):
            stream.close()
        wait_for(lambda: server.app.state.server.metrics.num_open <= 4)
        assert client.completions.create(model=NAME, prompt=TEXT, max_tokens=2).choices[0].text


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_disconnect_releases_slots(server: Running, stream: bool) -> None:
    body = {"prompt": [TEXT] * 3, "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    metrics = server.app.state.server.metrics
    with server.connection() as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body))
        wait_for(lambda: metrics.num_open == 3 and server.engine.core.scheduler.num_running == 3)
        if stream:
            connection.getresponse().read1(20)
    server.wait_until_idle()
    expect_nothing_left(server.engine)
    assert b'finished_reason="cancelled"' in metrics.text()


def test_lost_connection_ends_all_of_its_requests(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Three requests are sent at once: the first runs, the others wait for its response."""
    body = json.dumps({"prompt": [TEXT] * 3, "max_tokens": LONG, "ignore_eos": True}).encode()
    one = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    metrics = server.app.state.server.metrics
    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(one * 3)
            wait_for(lambda: metrics.num_open == 3)
        wait_for(lambda: "status=" in caplog.text)
        server.wait_until_idle()
    [line] = [record for record in caplog.records if record.name == "specdec_kernels.server"]
    assert re.fullmatch(
        rf'id=\w+ method=POST path={COMPLETIONS} status=499 .*finish=cancelled .*reason="the client has left" .*',
        line.getMessage(),
    )
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    expect_nothing_left(server.engine)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_request_timeout_is_reported(server: Running, client: OpenAI, stream: bool) -> None:
    """By status before the first token and for whole answers; by the last event of a stream."""
    for timeout in (1e-9, 0.05):
        given: dict[str, Any] = {"model": NAME, "prompt": TEXT, "max_tokens": LONG, "stream": stream, "n": 2}
        with pytest.raises(openai.APIError) as error:
            list(client.completions.create(**given, extra_body={"timeout": timeout, "ignore_eos": True}))
        message = f"timeout is {timeout}, expected more seconds: the request was not done after them"
        assert message in str(error.value) and (error.value.param, error.value.code) == ("timeout", "timeout")
        if not stream or timeout < 0.05:
            assert isinstance(error.value, openai.InternalServerError) and error.value.status_code == 504
        server.wait_until_idle()
        expect_nothing_left(server.engine)
    assert b'finished_reason="timeout"' in server.app.state.server.metrics.text()
    got = client.completions.create(model=NAME, prompt=TEXT, max_tokens=2, extra_body={"timeout": 600, "priority": -1})
    assert got.usage is not None and got.usage.completion_tokens == 2


def test_device_error_fails_one_request() -> None:
    engine = make_engine("none", adaptive=False, max_len=512)
    body = {"prompt": TEXT, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with serving(engine) as running, running.connection() as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body))
        response = connection.getresponse()
        response.read1(10)
        num_free = engine.state.pool.num_free
        before = int(num_free[0])
        num_free[0] = 0
        status, message, _ = running.error(COMPLETIONS, {"prompt": TEXT})
        assert status == 500 and re.match(r"^result: request 1 ended with ", message)
        assert b'"error"' in response.read() or before < 0


# --- other endpoints


def test_server_models_and_health_endpoints(server: Running, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.to_dict()["max_model_len"]) == (NAME, "model", 1024)
    assert server.ask("/health")[0] == 200


def test_health_of_closed_engine_fails() -> None:
    with serving(make_engine()) as running:
        running.engine.close()
        assert running.error("/health", None) == (503, "Engine is closed, expected an open one", None)
        assert running.error(COMPLETIONS, {"prompt": TEXT})[0] == 503


def test_flush_cache_drops_prefixes() -> None:
    with serving(make_engine(prefix_cache=True), api_key="secret") as running:
        key = {"Authorization": "Bearer secret"}

        def cached() -> int:
            body = {"prompt": TEXT * 8, "max_tokens": 2}
            usage = json.loads(running.ask(COMPLETIONS, body, key)[2])["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached(), cached() > 0) == (0, True)
        assert running.error("/flush_cache", {})[0] == 401
        assert cached() > 0
        assert running.ask("/flush_cache", {}, key)[0] == 200
        assert cached() == 0
        running.engine.close()
        assert running.error("/flush_cache", {}, key) == (503, "Engine is closed, expected an open one", None)


def test_tokenize_and_detokenize(server: Running) -> None:
    tokens = tokenizer()(TEXT)["input_ids"]
    answer = json.loads(server.ask("/tokenize", {"model": NAME, "prompt": TEXT})[2])
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": 1024}
    answer = json.loads(server.ask("/tokenize", {"messages": messages()})[2])
    assert answer["tokens"] == tokenizer()(TEXT + "\n")["input_ids"]
    assert json.loads(server.ask("/detokenize", {"tokens": tokens})[2]) == {"prompt": TEXT}
    assert server.ask("/tokenizer_info")[0] == 404
    assert server.error("/detokenize", {"tokens": [2048]}) == (400, "tokens has 2048, expected 0 to 2047", "tokens")
    assert server.error("/detokenize", {"tokens": "a"}) == (
        400,
        'tokens is "a", expected a list of token ids',
        "tokens",
    )


def test_tokenizer_info_is_that_of_vllm() -> None:
    """A flag enables it, and it names no folder of the server."""
    with serving(make_engine("none"), chat_template="{{ a }}", shows_tokenizer=True, api_key="k") as running:
        assert running.ask("/tokenizer_info")[0] == 401
        answer = running.ask("/tokenizer_info", headers={"Authorization": "Bearer k"})[2].decode()
    info = json.loads(answer)
    assert (info["tokenizer_class"], info["chat_template"]) == (type(tokenizer()).__name__, "{{ a }}")
    assert info["eos_token"] == tokenizer().eos_token and str(tiny_model("target")) not in answer


def test_configuration_of_a_tokenizer_is_json() -> None:
    given = {
        "vocab_file": "a",
        "bos_token": AddedToken("<s>"),
        "added": {3: AddedToken("b")},
        "list": [1, None],
        "dir": "/a",
    }
    one = SimpleNamespace(init_kwargs=given, chat_template=None)
    want = {"bos_token": "<s>", "added": {"3": "b"}, "list": [1, None], "tokenizer_class": "SimpleNamespace"}
    assert configuration_of(one, None) == want


def test_requests_of_an_address_are_those_of_one_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    tasks = server.app.state.server.tasks
    submit = tasks.submit_tokens

    def noting(token_lists: Any, params: Any) -> Any:
        found.extend(one.client for one in params)
        return submit(token_lists, params)

    monkeypatch.setattr(tasks, "submit_tokens", noting)
    for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, source_address=(address, 0))
        connection.request("POST", "/v1/completions", json.dumps({"prompt": TEXT, "max_tokens": 1}))
        assert connection.getresponse().status == 200
        connection.close()
    one, two, again = found
    assert one == again != two and min(found) > 0


def samples(running: Running) -> dict[str, float]:
    lines = [line for line in running.ask("/metrics")[2].decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_have_names_of_vllm_and_sglang() -> None:
    """`vllm bench serve` and SGLang's benchmark read these names."""
    with serving(make_engine("chain", adaptive=False)) as running, running.client() as client:
        assert samples(running)['vllm:spec_decode_num_drafts_total{model_name="tiny"}'] == 0
        used = client.completions.create(model=NAME, prompt=TEXT, max_tokens=50).usage
        list(client.completions.create(model=NAME, prompt=TEXT, max_tokens=50, stream=True))
        running.wait_until_idle()
        got = samples(running)
        assert used is not None and used.completion_tokens_details is not None

        def total(name: str, labels: str = "") -> float:
            return got[f'vllm:{name}_total{{model_name="tiny"{labels}}}']

        accepted = used.completion_tokens_details.accepted_prediction_tokens
        rejected = used.completion_tokens_details.rejected_prediction_tokens
        assert accepted and rejected
        assert total("spec_decode_num_accepted_tokens") == 2 * accepted
        assert total("spec_decode_num_draft_tokens") == 2 * (accepted + rejected)
        rounds = total("spec_decode_num_drafts")
        behind_prefill = used.completion_tokens - 1
        assert rounds == 2 * (behind_prefill - accepted)
        per_position = [total("spec_decode_num_accepted_tokens_per_pos", f',position="{i}"') for i in range(3)]
        assert sum(per_position) == 2 * accepted and per_position == sorted(per_position, reverse=True)
        assert total("prompt_tokens") == 2 * used.prompt_tokens
        assert total("generation_tokens") == 2 * used.completion_tokens
        assert got['vllm:time_to_first_token_seconds_count{model_name="tiny"}'] == 2
        length = got['sglang:spec_accept_length{model_name="tiny"}']
        assert length == pytest.approx(2 * behind_prefill / rounds)
        info = json.loads(running.ask("/get_server_info")[2])
        assert info["internal_states"] == [{"avg_spec_accept_length": length}]

        def alarm() -> list[float | None]:
            names = "draft_collapsed", "draft_collapses_total", "draft_recent_accepted_per_round"
            got = samples(running)
            return [got.get(f'specdec:{name}{{model_name="tiny"}}') for name in names]

        assert alarm() == [0, 0, None]
        running.engine.core.threads.acceptance.add(-1, 1 << 20, 1 << 22, 0)
        assert alarm() == [1, 1, pytest.approx(0, abs=1e-3)]


# --- the command


def test_sigterm_lets_requests_finish() -> None:
    """A running request gets its full answer, then the process ends."""
    process, line = start()
    try:
        assert re.fullmatch(r"specdec serve: tiny \(NGRAM\) at http://127\.0\.0\.1:\d+\n", line)
        port = int(line.strip().rsplit(":", 1)[1])
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            stream = iter(
                client.completions.create(
                    model=NAME, prompt=TEXT, max_tokens=300, stream=True, temperature=0, extra_body={"ignore_eos": True}
                )
            )
            text = next(stream).choices[0].text
            process.send_signal(signal.SIGTERM)
            chunks = list(stream)
            text += "".join(chunk.choices[0].text for chunk in chunks)
            assert chunks[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err) == (0, "", "")
        (want,) = make_engine("none", max_len=512).generate(TEXT, SamplingParams(300, ignore_eos=True))
        assert text == want.text
    finally:
        process.kill()
        process.communicate()


def test_end_of_drain_time_aborts_requests() -> None:
    """Clients of running requests and of uploads are notified, and the process ends without a traceback."""
    process, line = start("--drain-seconds", "0")
    running = Running(int(line.strip().rsplit(":", 1)[1]), None, None)  # type: ignore[arg-type]
    body = {"prompt": TEXT, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    try:
        with running.connection() as stream, running.connection() as upload:
            upload.putrequest("POST", COMPLETIONS)
            upload.putheader("Content-Length", "100")
            upload.endheaders(b"{")
            stream.request("POST", COMPLETIONS, json.dumps(body))
            response = stream.getresponse()
            response.read1(10)
            process.send_signal(signal.SIGTERM)
            last = response.read().split(b"\n\n")[-2].removeprefix(b"data: ")
            refused = upload.getresponse()
            assert refused.status == 503
            for answer in (last, refused.read()):
                message = json.loads(answer)["error"]["message"]
                assert message == "the request was cancelled, expected to be sent again"
        _, err = process.communicate(timeout=300)
        [refusal] = err.splitlines()
        assert process.returncode == 0 and " status=503 " in refusal
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drain-seconds", "-1"], "--drain-seconds is -1, expected at least 0"),
        (["/a", "--model-path", "/b"], "--model-path is /b, expected none with /a"),
        (["/nowhere"], "Engine: model is /nowhere, expected an existing folder or a hub id"),
        (["--chat-template", "/nowhere"], "--chat-template is /nowhere, expected a file that can be read (No such file or directory)"),
        (["--max-n", "0"], "--max-n is 0, expected at least 1"),
        (["--max-queued-requests", "-1"], "--max-queued-requests is -1, expected at least 0"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0, expected at least 1"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens is 0, expected at least 1"),
        (["--port", "70000"], "--port is 70000, expected 0 to 65535"),
        (["--mem-fraction-static", "0.5"], "--mem-fraction-static is 0.5, expected None (device is cpu)"),
        (["--speculative-algorithm", "EAGLE3", "--model-path", "m"], "--speculative-draft-model-path is missing, expected a folder or hub id for EAGLE3"),
        (["--host", "192.0.2.1"], "--host is 192.0.2.1 and --port 0, expected an address to listen on ([Errno 99] Cannot assign requested address)"),
        (["--context-length", "1"], "--context-length is 1, expected at least 2"),
    ],
)  # fmt: skip
def test_serve_refuses_bad_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    port = [] if "--port" in arguments else ["--port", "0"]
    assert cli.main(["serve", "--device", "cpu", *port, *arguments]) == 2
    assert capsys.readouterr().err == f"specdec serve: {message}\n"


@pytest.mark.parametrize(
    ("flags", "kept"),
    [([], True), (["--disable-radix-cache"], False), (["--enable-deterministic-inference"], False)],
    ids=["default", "disabled", "deterministic"],
)
def test_serve_enables_prefix_cache_by_default(flags: list[str], kept: bool) -> None:
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    engine_flags.add_serving(parser)
    given = ["--device", "cpu", "--speculative-algorithm", "NONE", "--context-length", "128", *flags]
    args = parser.parse_args(given)
    chosen, _ = engine_flags.resolve(args)
    with engine_flags.open_engine(args, chosen) as engine:
        assert engine.config.prefix_cache == kept


def test_serve_reports_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert cli.main(["serve", "--port", port, "--model-path", "/nowhere"]) == 2
    assert (
        f"--port {port}, expected an address to listen on ([Errno 98] Address already in use)"
        in capsys.readouterr().err
    )


def test_serve_refuses_model_without_tokenizer(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    engine = Engine(tmp_path, device="cpu", max_len=64)
    message = "serve: the model has no tokenizer that gives text piece by piece, expected one (the model folder has no tokenizer)"
    with engine, pytest.raises(ValueError, match=re.escape(message)):
        make_app(AsyncEngine(engine), Settings(model_name="m"))


def test_sampling_defaults_follow_generation_config(tmp_path: Path) -> None:
    """OpenAI's defaults hold unless the generation config samples."""
    assert sampling_defaults(tiny_model("target"), "model") == {"temperature": 1.0}
    assert sampling_defaults(tmp_path, "model") == {"temperature": 1.0}
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20).save_pretrained(tmp_path)
    got = sampling_defaults(tmp_path, "model")
    assert (got["temperature"], got["top_p"], got["top_k"]) == (0.6, 0.9, 20)
    assert sampling_defaults(tmp_path, "openai") == {"temperature": 1.0}
    GenerationConfig(no_repeat_ngram_size=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"; --sampling-defaults openai does not read it$"):
        sampling_defaults(tmp_path, "model")
    engine = make_engine("none")
    params = SamplingParams(8, temperature=0.6, top_k=20, seed=1)
    (want,) = engine.generate(TEXT, params)
    with serving(engine, defaults={"temperature": 0.6, "top_k": 20}) as running, running.client() as client:
        got_text = client.completions.create(model=NAME, prompt=TEXT, max_tokens=8, seed=1).choices[0].text
        assert got_text == want.text


def test_serve_names_missing_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find_spec(name))
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == 'specdec serve needs fastapi: pip install "specdec-kernels[serve]"\n'


def test_serving_process_tunes_gil_and_gc() -> None:
    """The GIL's switch interval is short and loaded objects are frozen; afterwards both are restored."""
    before, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    with serving_process():
        assert sys.getswitchinterval() == pytest.approx(2e-4)
        assert gc.get_freeze_count() > frozen
    assert sys.getswitchinterval() == before and gc.get_freeze_count() == 0
