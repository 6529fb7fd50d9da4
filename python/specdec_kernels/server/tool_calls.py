"""Parsers of tool calls in generated text: between tags (Hermes, Qwen), or the whole text (Llama 3)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from . import strict_json


class ToolCall(dict[str, Any]):
    """A tool call in OpenAI's form."""

    def __init__(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        super().__init__(id=f"call_{secrets.token_hex(12)}", type="function", function=function)


class ToolParser(Protocol):
    """A streaming parser of tool calls. Text and calls come out in the order of the text."""

    def push(self, text: str) -> list[str | ToolCall]:
        """Parse more text, and return what is complete."""
        ...

    def finish(self) -> list[str | ToolCall]:
        """Return what was held back."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with or without text around it.

    Whitespace next to a call is dropped. Tags whose content is no call of a given tool are text.
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._text = ""  # not returned yet
        self._inside = False  # a tag
        self._after_call = False  # only whitespace since the last call

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        found: list[str | ToolCall] = []
        while True:
            if self._after_call:
                self._text = self._text.lstrip()
                self._after_call = not self._text
            if not self._inside:
                before, tag, after = self._text.partition(self.BEGIN)
                if not tag:
                    kept = held_back(self._text, self.BEGIN)
                    if kept < len(self._text):
                        found.append(self._text[: len(self._text) - kept])
                        self._text = self._text[len(self._text) - kept :]
                    return found
                if before.strip():
                    found.append(before.rstrip())
                self._inside, self._text = True, after
            call, length = self._call()
            if call is None:
                return found
            found.append(call)
            self._inside, self._after_call, self._text = False, True, self._text[length:]

    def finish(self) -> list[str | ToolCall]:
        left = self.BEGIN + self._text if self._inside else self._text
        if self._inside and (call := call_of(parsed(self._text), self._names)) is not None:
            return [call]  # the text ended before the end tag
        return [left] if left else []

    def _call(self) -> tuple[ToolCall | None, int]:
        """Return the call before an end tag, and its length with the tag. An end tag within a string does not count."""
        at = self._text.find(self.END)
        while at >= 0:
            if (call := call_of(parsed(self._text[:at]), self._names)) is not None:
                return call, at + len(self.END)
            at = self._text.find(self.END, at + 1)
        return None, 0


class Llama3:
    """`{"name": ..., "parameters": {...}}`, or several separated by semicolons, and no other text."""

    TAG = "<|python_tag|>"  # a special token, which most tokenizers drop from the text

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        begin = self._text.lstrip()
        if not self._is_text and (not begin or begin[0] == "{" or self.TAG.startswith(begin[: len(self.TAG)])):
            return []
        self._is_text = True
        text, self._text = self._text, ""
        return [text] if text else []

    def finish(self) -> list[str | ToolCall]:
        calls: list[str | ToolCall] = []
        rest = self._text.strip().removeprefix(self.TAG).strip()
        while rest and not self._is_text:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                break
            if (call := call_of(value, self._names)) is None:
                break
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        if rest:
            return [self._text]
        return calls


class OneCall:
    """One call as JSON, generated under a grammar; plain text if the token budget cut it off."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._text = ""

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        return []

    def finish(self) -> list[str | ToolCall]:
        call = call_of(parsed(self._text), self._names)
        return [self._text if call is None else call] if self._text else []


class FirstCall:
    """The text of another parser up to its first call, and that call (`parallel_tool_calls: false`)."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._has_call = False

    def push(self, text: str) -> list[str | ToolCall]:
        return self._up_to_call(self._parser.push(text))

    def finish(self) -> list[str | ToolCall]:
        return self._up_to_call(self._parser.finish())

    def _up_to_call(self, found: list[str | ToolCall]) -> list[str | ToolCall]:
        kept: list[str | ToolCall] = []
        for item in found:
            if not self._has_call:
                kept.append(item)
                self._has_call = isinstance(item, ToolCall)
        return kept


class AfterThoughts:
    """Another parser for the text after the thoughts at its start (`<think>...</think>`), in which a call is none.

    Args:
        parser: of the text after them.
        in_thoughts: whether the prompt ended within them, as some chat templates end it.
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, parser: ToolParser, in_thoughts: bool) -> None:
        self._parser = parser
        self._tag: str | None = self.END if in_thoughts else self.BEGIN  # waited for; None: the thoughts are over
        self._text = ""  # not returned yet

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        found: list[str | ToolCall] = []
        begin = self._text.lstrip()
        if self._tag == self.BEGIN and not self.BEGIN.startswith(begin[: len(self.BEGIN)]):
            self._tag = None
        elif self._tag == self.BEGIN and len(begin) >= len(self.BEGIN):
            self._tag = self.END
        if self._tag == self.END:
            thoughts, tag, after = self._text.partition(self.END)
            if tag:
                self._tag, self._text = None, after
                found.append(thoughts + tag)
            elif kept := held_back(self._text, self.END):
                found.append(self._text[:-kept])
                self._text = self._text[-kept:]
            else:
                found.append(self._text)
                self._text = ""
        if self._tag is None:
            text, self._text = self._text, ""
            found += self._parser.push(text)
        return [item for item in found if item]

    def finish(self) -> list[str | ToolCall]:
        if self._tag is None:
            return self._parser.finish()
        return [self._text] if self._text else []


PARSERS: dict[str, type[Hermes] | type[Llama3]] = {"hermes": Hermes, "llama3": Llama3}


def parser_for(chat_template: str) -> str:
    """Return the name of the parser for a chat template: Llama 3's names `parameters`, others use Hermes' tags."""
    return "llama3" if Hermes.BEGIN not in chat_template and '"parameters"' in chat_template else "hermes"


def held_back(text: str, tag: str) -> int:
    """Count the characters at the end that may be the start of the tag, or whitespace before it."""
    partial = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())


def parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any, names: Sequence[str]) -> ToolCall | None:
    """Convert an object to a call of one of the tools; None if it is none."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], strict_json.dumps(arguments))
