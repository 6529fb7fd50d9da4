"""Constrained answers of models that reason first: free up to the end token, constrained from there on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from specdec_kernels.engine import SamplingParams
from specdec_kernels.server.parsers import (
    REASONING_PARSERS,
    Format,
    PlainText,
    Reasoning,
    ReasoningByTokens,
    ThinkTokens,
)
from support.request_engines import make_engine
from support.server_thread import NAME, Running, serving
from support.think_tokens import BEGIN, END, PROMPT, THOUGHT, with_tags

OPENED = f"{PROMPT}<think>"
ANSWER = "(yes|no), [ab]{3}"
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
TOOL: Any = {"type": "function", "function": {"name": "area", "parameters": SCHEMA}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Yield a server whose model has tags that are in its texts, or are special tokens."""
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    tokens = with_tags(special=request.param)
    engine = make_engine("union", max_len=256, adaptive=False, grammars=True, tokenizer=tokens)
    with serving(engine, reasoning_parser="qwen3", chat_template="{{ messages[-1]['content'] }}") as running:
        running.app.state.server.grammars.compile = compile_at_submission
        yield running


async def compile_at_submission(_: SamplingParams) -> None:
    """Try no grammar out in another process, which takes seconds to start."""


def ask(client: OpenAI, text: str = OPENED, **given: Any) -> Any:
    """Return the only choice of a chat, which is the same without speculation, and as a stream."""
    extra = given.pop("extra_body", {})
    fields = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 60, **given}
    plain, whole = (
        client.chat.completions.create(**fields, extra_body=extra | {"speculation": speculation})
        for speculation in ("off", "on")
    )
    *chunks, last = client.chat.completions.create(
        **fields, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    choice, deltas = whole.choices[0], [chunk.choices[0].delta for chunk in chunks]
    for name in ("reasoning_content", "content"):
        text = getattr(choice.message, name, None) or ""
        assert text == (getattr(plain.choices[0].message, name, None) or "")
        assert text == "".join(getattr(delta, name, None) or "" for delta in deltas)
    details = [each.usage.completion_tokens_details.reasoning_tokens for each in (plain, whole, last)]
    assert len(set(details)) == 1
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == plain.choices[0].finish_reason
    choice.reasoning_tokens = details[0]
    return choice


def texts(choice: Any) -> tuple[Any, Any]:
    return getattr(choice.message, "reasoning_content", None), choice.message.content


@pytest.mark.parametrize(
    ("prompt", "num_tokens"), [(OPENED, 6), (PROMPT, 7)], ids=["opened by the prompt", "opened by the model"]
)
def test_answer_is_constrained_after_its_reasoning(client: OpenAI, prompt: str, num_tokens: int) -> None:
    choice = ask(client, prompt, extra_body={"regex": ANSWER})
    reasoning, content = texts(choice)
    assert reasoning == THOUGHT and re.fullmatch(ANSWER, content) and choice.finish_reason == "stop"
    assert choice.reasoning_tokens == num_tokens


def test_schema_and_forced_call_hold_after_reasoning(client: OpenAI) -> None:
    choice = ask(client, response_format=FORMAT)
    assert texts(choice)[0] == THOUGHT and isinstance(json.loads(texts(choice)[1])["sure"], bool)
    choice = ask(client, tools=[TOOL], tool_choice="required", max_tokens=200)
    assert texts(choice) == (THOUGHT, None) and choice.finish_reason == "tool_calls"
    assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments)["sure"], bool)
    choice = ask(client, extra_body={"ebnf": 'root ::= "yes" | "no"'})
    assert choice.message.content in ("yes", "no") and texts(choice)[0] == THOUGHT


def test_answer_without_reasoning_is_constrained_at_once(client: OpenAI) -> None:
    """The prompt ends the reasoning, as templates do whose switch is off; or the model does not begin any."""
    for prompt, extra in ((f"{OPENED}\n</think>\n", {}), (PROMPT, {"logit_bias": {str(BEGIN): -100}})):
        choice = ask(client, prompt, extra_body={"regex": ANSWER, **extra})
        assert texts(choice)[0] is None and re.fullmatch(ANSWER, texts(choice)[1]) and choice.reasoning_tokens == 0


def test_reasoning_that_does_not_end_is_all_of_the_text(client: OpenAI) -> None:
    choice = ask(client, max_tokens=4, extra_body={"regex": ANSWER})
    reasoning, content = texts(choice)
    assert THOUGHT.startswith(reasoning or "-") and not content and choice.finish_reason == "length"
    choice = ask(client, max_tokens=9, extra_body={"regex": ANSWER, "logit_bias": {str(END): -100}})
    assert not texts(choice)[1] and choice.reasoning_tokens == 9, "no token ends the text"
    choice = ask(client, stop="right", extra_body={"regex": ANSWER})
    assert texts(choice) == ("opy", "")


def test_reasoning_that_is_left_out_precedes_the_answer(client: OpenAI) -> None:
    for left_out in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        choice = ask(client, extra_body={"regex": ANSWER, **left_out})
        assert texts(choice)[0] is None and re.fullmatch(ANSWER, texts(choice)[1]) and choice.reasoning_tokens == 6
    choice = ask(client, extra_body={"regex": ANSWER, "separate_reasoning": False})
    assert re.fullmatch(ANSWER, texts(choice)[1]) and choice.reasoning_tokens == 0, "the content has it from its start"


def test_continued_message_decides_by_its_own_text(client: OpenAI) -> None:
    """A template may write its end without an open tag."""
    for text, reasons in ((OPENED, True), (PROMPT, False), (f"<think>a</think>{PROMPT}", False)):
        extra = {"regex": ANSWER, "continue_final_message": True, "add_generation_prompt": False}
        fields: Any = {"model": NAME, "max_tokens": 60, "messages": [{"role": "assistant", "content": text}]}
        choice = client.chat.completions.create(**fields, extra_body=extra).choices[0]
        assert texts(choice)[0] == (THOUGHT if reasons else None) and re.fullmatch(ANSWER, texts(choice)[1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_response_has_items_of_reasoning_and_of_the_constrained_text(client: OpenAI, stream: bool) -> None:
    """Log-probabilities are those of the message alone."""
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    given: Any = {"model": NAME, "input": OPENED, "text": text, "include": ["message.output_text.logprobs"]}
    if stream:
        *_, last = client.responses.create(**given, stream=True)
        response = last.response
    else:
        response = client.responses.create(**given)
    reasoning, message = response.output
    assert reasoning.content[0].text == THOUGHT and isinstance(json.loads(response.output_text)["sure"], bool)
    tokens = [one.token for one in message.content[0].logprobs]
    assert "".join(tokens).removesuffix("<|endoftext|>") == response.output_text
    assert response.usage.output_tokens_details.reasoning_tokens == 6


def test_choices_reason_on_their_own(client: OpenAI) -> None:
    fields: Any = {"model": NAME, "messages": [{"role": "user", "content": OPENED}], "max_tokens": 60, "n": 3}
    choices = client.chat.completions.create(
        **fields, temperature=0.7, seed=1, extra_body={"regex": ANSWER, "logit_bias": {str(END): 4}}
    ).choices
    for choice in choices:
        reasoning, content = texts(choice)
        assert reasoning is None or "</think>" not in reasoning
        assert re.fullmatch(ANSWER, content) or choice.finish_reason == "length"


# --- which tokens mark the reasoning

TAGS = {"<think>": 1, "</think>": 2, "<|tool_calls_section_begin|>": 3}


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_tokens_of_each_parser(name: str) -> None:
    """Open in the prompt, closed in the prompt, left to the model."""

    def found(prompt_end: str, tokens: dict[str, int] = TAGS, continued: str | None = None) -> ThinkTokens | None:
        return Format("hermes", name).think_tokens(tokens, lambda token: f"<{token}>", prompt_end, continued)

    if name == "gpt_oss":
        assert found("<|start|>assistant") is None, "its answer begins after several tokens"
        return
    never = [3] if name == "kimi_k2" else []
    inside = ThinkTokens(2, "<2>", 1, True, never)
    assert found("a<think>\n") == found("a</think>b", continued="</think><think>b") == inside
    assert found("a<think>\n\n</think>\n\n") is None and found("<think>", continued="b") is None
    from_start = name in ("deepseek_r1", "minimax_m2")
    assert found("assistant\n") == ThinkTokens(2, "<2>", 1, from_start, never)
    assert found("a<think>", {"<think>": 1}) is None, "its end is several tokens"
    assert (found("a", {"</think>": 2}) is None) == (not from_start)


def test_tag_in_several_tokens_is_a_part_of_the_reasoning() -> None:
    """Cut anywhere: whitespace around the reasoning is dropped, that of the answer stays."""
    tokens = [
        (1, "<think>"),
        (9, "\n a "),
        (9, "</th"),
        (9, "ink>"),
        (9, " \n"),
        (2, "</think>"),
        (9, "\nb "),
        (2, "</think>"),
    ]
    text = "".join(piece for _, piece in tokens)
    for size in range(1, len(text) + 1):
        parser = ReasoningByTokens(PlainText(), ThinkTokens(2, "</think>", 1, inside=False))
        items: list[Any] = []
        noted, end = 0, 0
        for at in range(0, len(text), size):
            while end < at + size and noted < len(tokens):
                end += len(tokens[noted][1])
                parser.on_token(tokens[noted][0], end)
                noted += 1
            items += parser.push(text[at : at + size])
        items += parser.finish()
        assert "".join(one.text for one in items if isinstance(one, Reasoning)) == "a </think>"
        assert "".join(one for one in items if isinstance(one, str)) == "\nb </think>"
        assert parser.num_reasoning_tokens == 6 and parser.reasoning_spans == [(0, text.index("\nb "))]
