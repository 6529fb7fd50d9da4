"""Parsers of reasoning and tool calls: the same items for a text whole and for every cut of it."""

from __future__ import annotations

import copy
import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels.engine import NewTokens, SamplingParams
from specdec_kernels.engine.text.detokenizer import Detokenizer
from specdec_kernels.server.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    FirstCall,
    Format,
    Parser,
    Reasoning,
    ToolCall,
    format_of,
    reasoning_parser_for,
    tool_parser_for,
)
from specdec_kernels.server.responses import Choice
from specdec_kernels.status import FinishReason
from support.tiny_checkpoint import tokenizer

PROPERTIES = {
    "a": {},
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "rate": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "kind": {"enum": ["a", 1]},
    "point": {"$ref": "#/$defs/point"},
    "list": {"type": ["array"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"point": {"type": "object"}}}
TOOLS = {"area": SCHEMA, "draw.line": None}


def merged(items: list[Any]) -> list[Any]:
    """Join neighbors; a call is its name and arguments, reasoning a list of one text."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, ToolCall):
            found.append((item.name, json.loads(item.arguments)))
        elif isinstance(item, Reasoning):
            if found and isinstance(found[-1], list):
                found[-1][0] += item.text
            else:
                found.append([item.text])
        elif found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return found


def parse(parser: Parser, text: str, cuts: list[int]) -> tuple[list[Any], Any]:
    bounds = [0, *cuts, len(text)]
    found = [item for a, b in pairwise(bounds) for item in parser.push(text[a:b])]
    found += parser.finish()
    assert all(item not in ("", Reasoning("")) for item in found)
    return merged(found), list(parser.reasoning_spans)


def all_cuts(text: str) -> list[list[int]]:
    return [[], [*range(1, len(text))], [*range(3, len(text), 3)], *([at] for at in range(1, len(text)))]


HERMES = '<tool_call>{"name": "area", "arguments": {"a": "</tool_call>"}}</tool_call>'
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>area\n```json\n{"a": "é}<"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>area<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
QWEN = (
    "<tool_call>\n<function=area>\n<parameter=text>\n 5\nü </tool_call>\n</parameter>\n<parameter=count>\n5\n</parameter>\n"
    "<parameter=flag>True</parameter><parameter=rate>\n-1.5e3\n</parameter>\n<parameter=maybe>\nnull\n</parameter>"
    "<parameter=point>{\"x\": [1]}</parameter><parameter=list>\n['a', None]\n</parameter><parameter=kind>1</parameter>"
    "<parameter=other>7</parameter>\n</function>\n</tool_call>"
)
QWEN_VALUES = {
    "text": " 5\nü </tool_call>", "count": 5, "flag": True, "rate": -1500.0, "maybe": None, "point": {"x": [1]},
    "list": ["a", None], "kind": 1, "other": "7",
}  # fmt: skip
GLM = "<tool_call>area\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="area">\n<parameter name="count">5</parameter>\n</invoke>\n</minimax:tool_call>'
)
KIMI = '<|tool_call_begin|>functions.draw.line:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
COMMENTARY = "<|start|>assistant<|channel|>commentary"

CASES = [
    ("hermes", "no call < at <tool all \n", ["no call < at <tool all \n"]),
    ("hermes", f"First \n{HERMES}\n{HERMES} then", ["First", ("area", {"a": "</tool_call>"}), ("area", {"a": "</tool_call>"}), "then"]),
    ("hermes", '<tool_call>{"name": "area", "arguments": "{}"}</tool', [("area", {})]),
    ("hermes", 'a <tool_call>{"name": "other", "arguments": {}}</tool_call> b', ['a <tool_call>{"name": "other", "arguments": {}}</tool_call> b']),
    ("hermes", f"<tool_call>[1</tool_call> and\n{HERMES}", ["<tool_call>[1</tool_call> and", ("area", {"a": "</tool_call>"})]),
    ("hermes", '<tool_call>{"name": "area", "arguments": {"a": NaN}}</tool_call>', ['<tool_call>{"name": "area", "arguments": {"a": NaN}}</tool_call>']),
    ("llama3_json", '{"name": "area", "parameters": {"a": 1}}; {"name": "area", "parameters": {}}', [("area", {"a": 1}), ("area", {})]),
    ("llama3_json", '<|python_tag|>{"name": "area", "parameters": {"ä": 1.5}}', [("area", {"ä": 1.5})]),
    ("llama3_json", '{"name": "area"} but', ['{"name": "area"} but']),
    ("llama3_json", '{"name": ["area"]}', ['{"name": ["area"]}']),
    ("llama3_json", "<|py", ["<|py"]),
    ("llama3_json", "text {}", ["text {}"]),
    ("qwen3_coder", f"Hi\n\n{QWEN}\n{QWEN}\n", ["Hi", ("area", QWEN_VALUES), ("area", QWEN_VALUES)]),
    ("qwen3_coder", "<function=draw.line></function>\n</tool_call> end", [("draw.line", {}), "end"]),
    ("qwen3_coder", "<tool_call><function=area><parameter=count>many</parameter><parameter=maybe>6", ["<tool_call><function=area><parameter=count>many</parameter><parameter=maybe>6"]),
    ("qwen3_coder", "<tool_call><function=area><parameter=count>many</parameter></function></tool", [("area", {"count": "many"})]),
    ("qwen3_coder", "<tool_call>x</tool_call><function=other></function>.", ["<tool_call>x</tool_call><function=other></function>."]),
    ("glm45", f"so\n{GLM}\n{GLM}", ["so", ("area", {"text": "5", "count": 5}), ("area", {"text": "5", "count": 5})]),
    ("glm45", "<tool_call>draw.line</tool_call>", [("draw.line", {})]),
    ("glm45", "<tool_call>area<arg_key>a</arg_key> 1</tool_call>", ["<tool_call>area<arg_key>a</arg_key> 1</tool_call>"]),
    ("minimax_m2", f"so\n{MINIMAX}", ["so", ("area", {"count": 5})]),
    ("kimi_k2", f"so <|tool_calls_section_begin|>{KIMI}\n{KIMI}<|tool_calls_section_end|>", ["so", ("draw.line", {"a": 1}), ("draw.line", {"a": 1})]),
    ("mistral", 'Hi [TOOL_CALLS] [{"name": "area", "arguments": {"a": "[\\"]}"}}, {"name": "area", "arguments": "{}"}] on', ["Hi", ("area", {"a": '["]}'}), ("area", {}), "on"]),
    ("mistral", '[TOOL_CALLS]area[ARGS]{"a": {}}[TOOL_CALLS]draw.line{"ü": 1}', [("area", {"a": {}}), ("draw.line", {"ü": 1})]),
    ("mistral", '[TOOL_CALLS]area[CALL_ID]abc123XYZ[ARGS]{}', [("area", {})]),
    ("mistral", '[TOOL_CALLS] no, [TOOL_CALLS]other{}, [TOOL_CALLS]area{"a": 1', ['[TOOL_CALLS] no, [TOOL_CALLS]other{}, [TOOL_CALLS]area{"a": 1']),
    ("mistral", '[TOOL_CALLS][{"name": "area"}, 3]', ['[TOOL_CALLS][{"name": "area"}, 3]']),
    ("deepseek_v3", f"so <｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", ["so", ("area", {"a": "é}<"}), ("area", {"a": "é}<"})]),
    ("deepseek_v3", f"{V3}<｜tool▁call▁begin｜>function<｜tool▁sep｜>area\n", [("area", {"a": "é}<"}), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>area\n"]),
    ("deepseek_v31", f"so <｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜> on", ["so", ("area", {"a": 1}), ("area", {"a": 1}), "on"]),
    ("pythonic", '[area(text="]ü", count="3", flag=true, maybe=None, a=[-1, (2.5, {"k": False})]), draw.line()]', [("area", {"text": "]ü", "count": 3, "flag": True, "maybe": None, "a": [-1, [2.5, {"k": False}]]}), ("draw.line", {})]),
    ("pythonic", "<|python_start|>[area(text=007.50)]<|python_end|>", [("area", {"text": "007.50"})]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[area(1)]", ["[area(1)]"]),
    ("pythonic", "[area(a=open())]", ["[area(a=open())]"]),
    ("pythonic", "[area(a=1e999)] \n", ["[area(a=1e999)] \n"]),
    ("pythonic", "[area(a=1), other()]", ["[area(a=1), other()]"]),
    ("pythonic", "Here: [area()]", ["Here: [area()]"]),
    ("openai", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>", [["hm"], "Hi <b>"]),
    ("openai", "<|channel|>analysis<|message|>a<|end|>" + COMMENTARY + '<|message|>one sec<|end|>' + COMMENTARY + ' to=functions.area <|constrain|>json<|message|>{"a": "ü"}<|call|>', [["a"], "one sec", ("area", {"a": "ü"})]),
    ("openai", '<|start|>assistant to=functions.draw.line<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.area<|message|>', [("draw.line", {}), ("area", {})]),
    ("openai", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", [["a\nb"]]),
    ("openai", "<|channel|>commentary to=functions.area<|message|>{no<|call|>" + COMMENTARY + " to=functions.other<|message|>{}", ["{no\n{}"]),
    ("openai", "plain text < to=you", ["plain text < to=you"]),
    ("openai", "to be", ["to be"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "want"), CASES)
def test_tool_parser_finds_the_same_calls_for_every_cut_of_the_text(name: str, text: str, want: list[Any]) -> None:
    form = Format(name, "gpt_oss" if name == "openai" else None)
    for cuts in all_cuts(text):
        assert parse(form.parser(TOOLS), text, cuts)[0] == want


@given(st.sampled_from(sorted(TOOL_PARSERS)), st.lists(st.integers(0, 40), max_size=4), st.data())
def test_parsers_of_mangled_texts_do_not_depend_on_cuts(name: str, dropped: list[int], data: Any) -> None:
    """Characters are dropped from texts of every format, which leaves broken tags and values."""
    text = data.draw(st.sampled_from([text for _, text, _ in CASES]))
    prefix = data.draw(st.sampled_from(["", "<think>", "<think>a</think>", " \n"]))
    for at in dropped:
        text = text[: at * 3] + text[at * 3 + 1 :]
    text = prefix + text
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6)))
    inside = data.draw(st.sampled_from(["", "<think>\n"]))
    reasoning = data.draw(st.sampled_from([None, *REASONING_PARSERS]))
    form = Format(name, reasoning)
    assert parse(form.parser(TOOLS, inside), text, cuts) == parse(form.parser(TOOLS, inside), text, [])


REASONED = [
    ("qwen3", "", "<think>\na\n\nb\n</think>\n\nHi\n", [["a\n\nb"], "Hi\n"]),
    ("qwen3", "<think>\n", "a</thin</think>Hi", [["a</thin"], "Hi"]),
    ("qwen3", "<think>\n", "\n<think>a</think>Hi", [["a"], "Hi"]),
    ("qwen3", "<think>\n\n</think>\n\n", "Hi</think>", ["Hi</think>"]),
    ("qwen3", "", "Hi <think>a</think>", ["Hi <think>a</think>"]),
    ("qwen3", "", "<thing> x", ["<thing> x"]),
    ("qwen3", "", " \n<thi", [" \n<thi"]),
    ("qwen3", "<think>", "never ends </thi", [["never ends </thi"]]),
    ("qwen3", "<think>", "</think>Hi", ["Hi"]),
    ("qwen3", "<think>", f"{HERMES}</think>{HERMES}", [[HERMES], ("area", {"a": "</tool_call>"})]),
    ("qwen3", "<think>", "ends at once\n</think>\n", [["ends at once"]]),
    ("deepseek_r1", "", "a</think>Hi", [["a"], "Hi"]),
    ("deepseek_r1", "", "a", [["a"]]),
    ("deepseek_r1", "</think>", "Hi", ["Hi"]),
    ("minimax_m2", "", "a\n</think>\n\nHi", [["a"], "Hi"]),
    ("glm45", "", "\n<think>a</think>\nHi", [["a"], "Hi"]),
    ("nemotron", "", "Hi", ["Hi"]),
    ("kimi_k2", "", "<think>a\n<|tool_calls_section_begin|>b", [["a"], "<|tool_calls_section_begin|>b"]),
    ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", "a<|end|><|start|>assistant<|channel|>final<|message|>Hi", [["a"], "Hi"]),
    ("gpt_oss", "<|start|>user<|message|>x<|end|><|start|>assistant", " to=functions.area<|channel|>commentary<|message|>{}<|call|>", [("area", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "want"), REASONED)
def test_reasoning_parser_splits_the_same_for_every_cut_of_the_text(
    name: str, prompt: str, text: str, want: list[Any]
) -> None:
    form = Format("hermes", name)
    for cuts in all_cuts(text):
        assert parse(form.parser(TOOLS, prompt), text, cuts)[0] == want


def test_reasoning_without_a_parser_stays_in_the_text() -> None:
    """A call within it is text."""
    text = f"\n<think> {HERMES}\n</think>\n{HERMES}"
    for cuts in all_cuts(text):
        got, spans = parse(Format("hermes", None).parser(TOOLS), text, cuts)
        assert (got, spans) == ([f"\n<think> {HERMES}\n</think>", ("area", {"a": "</tool_call>"})], [])


def test_reasoning_spans_cover_reasoning_and_its_tags() -> None:
    text = "<think>a</think>Hi"
    parser = Format("hermes", "qwen3").parser({})
    parser.push(text[:8])
    assert parser.reasoning_spans == [(0, None)]
    parser.push(text[8:])
    assert parser.reasoning_spans == [(0, text.index("Hi"))]
    first, then = "<|channel|>analysis<|message|>a<|end|>", "<|start|>assistant<|channel|>final<|message|>b<|end|>"
    harmony = Format("openai", "gpt_oss").parser({})
    harmony.push(first + then + first)
    both = len(first + then)
    assert harmony.reasoning_spans == [(0, len(first)), (both, both + len(first))]


def test_first_call_ends_the_text() -> None:
    parser = FirstCall(Format("hermes", "qwen3").parser(TOOLS))
    assert parse(parser, f"<think>a</think>b{HERMES}c{HERMES}", [])[0] == [["a"], "b", ("area", {"a": "</tool_call>"})]


MARKED = {
    "openai": (
        Format("openai", "gpt_oss"),
        "<|channel|>analysis<|message|>hé<|end|><|start|>assistant<|channel|>final<|message|>Hi X<|return|>",
        [["hé"], "Hi X"],
    ),
    "mistral": (Format("mistral", None), 'é [TOOL_CALLS]area[ARGS]{"a": 1} X', ["é", ("area", {"a": 1}), "X"]),
    "qwen3": (Format("hermes", "qwen3"), "<think>é</think>a<|other|>b X", [["é"], "ab X"]),
}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_special_tokens_reach_the_parser_that_reads_them(name: str, stops: bool) -> None:
    """A stop string, found in the text without them, cuts off the same end."""
    form, text, want = MARKED[name]
    own = copy.deepcopy(tokenizer())
    own.add_special_tokens({"additional_special_tokens": [*form.tags(True), "<|other|>"]})
    plain, markup = Detokenizer(own), Detokenizer(own, form.tags(True))
    prompt, tokens = [5, 6], own(text)["input_ids"]
    final, marked = plain.text(prompt, tokens), text.replace("<|other|>", "")
    if stops:
        final, marked = final.partition("X")[0], marked.partition("X")[0]
        want = merged([*(parser := form.parser(TOOLS)).push(marked), *parser.finish()])
    for size in (1, 2, 5, 100):
        output: Any = SimpleNamespace(prompt_tokens=prompt, tokens=tokens, text=None)
        params = SamplingParams(stop=["X!"])
        request: Any = SimpleNamespace(output=output, outcome=partial(lambda one: one, output), params=params)
        choice = Choice(request, plain, form.parser(TOOLS), False, markup=markup)
        found: list[Any] = []
        for at in range(0, len(tokens), size):
            last = at + size >= len(tokens)
            if last:
                output.text = final
            reason = FinishReason.STOP if last else FinishReason.RUNNING
            pieces = choice.on_tokens(NewTokens(0, tokens[at : at + size], reason))
            found += choice.parse("".join(piece.text for piece in pieces), last)
        assert choice.final_text() == marked and merged(found) == want


def test_call_ids_have_the_form_that_the_template_expects() -> None:
    def call_id(name: str, text: str) -> str:
        (call,) = TOOL_PARSERS[name](TOOLS).push(text)
        assert isinstance(call, ToolCall)
        return str(call["id"])

    assert call_id("hermes", HERMES).startswith("call_")
    assert len(call_id("mistral", "[TOOL_CALLS]area{}")) == 9
    assert call_id("mistral", "[TOOL_CALLS]area[CALL_ID]abc123XYZ[ARGS]{}") == "abc123XYZ"
    assert call_id("kimi_k2", KIMI) == "functions.draw.line:1"


def test_long_calls_are_parsed_in_time_that_grows_with_their_length() -> None:
    """A megabyte in small pieces, of a call and of a text of tags alone."""
    call = '[TOOL_CALLS]area{"a": "' + "x" * 1_000_000 + '"}'
    for name, text in (
        ("mistral", call),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" * 50_000),
        ("hermes", "<tool_call>" * 20_000),
    ):
        parser = TOOL_PARSERS[name](TOOLS)
        for at in range(0, len(text), 5000):
            parser.push(text[at : at + 5000])
        parser.finish()


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }} <tool_call> <think>", "hermes", "qwen3"),
        ("<tool_call> <function= <parameter=", "qwen3_coder", None),
        ('{"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "qwen3"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "qwen3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<|channel|>analysis", "openai", "gpt_oss"),
        ("<tool_call> <arg_key> <think>", "glm45", "qwen3"),
        ("", "hermes", None),
    ],
)
def test_parsers_follow_from_the_template(template: str, tools: str, reasoning: str | None) -> None:
    assert (tool_parser_for(template), reasoning_parser_for(template)) == (tools, reasoning)


@pytest.mark.parametrize(
    ("tools", "reasoning", "want"),
    [
        ("llama3", "none", Format("llama3_json", None)),
        ("gpt-oss", "gpt-oss", Format("openai", "gpt_oss")),
        ("deepseekv31", "deepseek-r1", Format("deepseek_v31", "deepseek_r1")),
        (None, None, Format("hermes", "qwen3")),
    ],
)
def test_format_has_names_of_other_engines(tools: str | None, reasoning: str | None, want: Format) -> None:
    assert format_of("<think>", tools, reasoning) == want


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_format_with_an_unknown_name_is_refused(flag: str) -> None:
    names = [*TOOL_PARSERS] if flag == "--tool-call-parser" else [*REASONING_PARSERS, "none"]
    with pytest.raises(ValueError) as error:
        format_of("", *(("yaml", None) if flag == "--tool-call-parser" else (None, "yaml")))
    assert str(error.value) == f"{flag} is yaml, expected one of {', '.join(names)}"
