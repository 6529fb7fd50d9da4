"""Parsers of texts that are tool calls and nothing else."""

from __future__ import annotations

import ast
import json
import math
import re
from abc import abstractmethod
from typing import Any

from .items import (
    Item,
    Parser,
    Span,
    ToolCall,
    Tools,
    WithoutReasoning,
    call_of,
    kinds_of,
    literal,
    parsed,
    partial_tag,
)


class WholeText(WithoutReasoning):
    """A text that is withheld as long as it may be calls, and passed on from where its beginning is that of none."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> list[Item]:
        self._text += text
        if not self._is_text and self._may_be_calls(self._text.lstrip()):
            return []
        self._is_text = True
        text, self._text = self._text, ""
        return [text] if text else []

    @abstractmethod
    def _may_be_calls(self, begin: str) -> bool:
        """Return whether a text that begins so, without white space in front, may be calls."""


class Llama3(WholeText):
    """`{"name": ..., "parameters": {...}}`, or several separated by semicolons, and no other text."""

    TAG = "<|python_tag|>"
    TOKENS = (TAG,)  # its tags that may be special tokens

    def _may_be_calls(self, begin: str) -> bool:
        return not begin or begin[0] == "{" or self.TAG.startswith(begin[: len(self.TAG)])

    def finish(self) -> list[Item]:
        calls: list[Item] = []
        rest = self._text.strip().removeprefix(self.TAG).strip()
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                break
            if (call := call_of(value, self._tools)) is None:
                break
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        if rest:
            return [self._text]
        return calls


class Pythonic(WholeText):
    """`[f(x=1), g(y="a")]`, calls of Python with literal values, and no other text: Llama 4."""

    TOKENS = TAGS = ("<|python_start|>", "<|python_end|>")
    _CALL = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)")  # the begin of a call, as far as it is there

    def _may_be_calls(self, begin: str) -> bool:
        if self.TAGS[0].startswith(begin):
            return True
        begin = begin.removeprefix(self.TAGS[0]).lstrip()
        return not begin or self._CALL.match(begin) is not None

    def finish(self) -> list[Item]:
        if not self._text:
            return []
        source = self._text.strip().removeprefix(self.TAGS[0])
        source = source[: len(source) - partial_tag(source, self.TAGS[1:])].removesuffix(self.TAGS[1]).strip()
        return list(self._calls(source)) or [self._text]

    def _calls(self, source: str) -> list[ToolCall]:
        """Return the calls of a list; empty if an element is no call of a tool."""
        try:
            expression = ast.parse(source, mode="eval").body
            if isinstance(expression, ast.List):
                return [self._call(one, source) for one in expression.elts]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        return []

    def _call(self, node: ast.expr, source: str) -> ToolCall:
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        name = ast.unparse(node.func)
        if name not in self._tools:
            raise ValueError("no call of a tool")
        schema = self._tools[name]
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("no name")
            value = value_of(keyword.value)
            kinds = kinds_of(properties.get(keyword.arg), schema) if isinstance(properties, dict) else set()
            if kinds == {"string"} and isinstance(value, int | float):
                value = ast.get_source_segment(source, keyword.value)
            elif isinstance(value, str) and kinds and "string" not in kinds:
                value = literal(value)
            arguments[keyword.arg] = value
        return ToolCall(name, arguments)


def value_of(node: ast.expr) -> Any:
    """Return a literal value of Python, in which JSON's names of constants also count.

    Raises:
        ValueError: it is none, or none of JSON.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value) if value not in (math.inf, -math.inf):
            return value
        case ast.Name(id="true" | "false" | "null"):
            return {"true": True, "false": False, "null": None}[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -value_of(node.operand)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [value_of(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return {name: value_of(value) for name, value in zip(names, values, strict=True)}
    raise ValueError("no literal value of JSON")


class OneCall(WholeText):
    """One call as JSON, generated under a grammar; plain text if the token budget cut it off."""

    def _may_be_calls(self, begin: str) -> bool:
        return True

    def finish(self) -> list[Item]:
        call = call_of(parsed(self._text), self._tools)
        return [self._text if call is None else call] if self._text else []


class PlainText(WithoutReasoning):
    """Text without calls."""

    def push(self, text: str) -> list[Item]:
        return [text] if text else []

    def finish(self) -> list[Item]:
        return []


class FirstCall:
    """The text of another parser up to its first call, and that call (`parallel_tool_calls: false`)."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._has_call = False

    @property
    def reasoning_spans(self) -> list[Span]:
        return list(self._parser.reasoning_spans)

    def push(self, text: str) -> list[Item]:
        return self._up_to_call(self._parser.push(text))

    def finish(self) -> list[Item]:
        return self._up_to_call(self._parser.finish())

    def _up_to_call(self, found: list[Item]) -> list[Item]:
        kept: list[Item] = []
        for item in found:
            if not self._has_call:
                kept.append(item)
                self._has_call = isinstance(item, ToolCall)
        return kept
