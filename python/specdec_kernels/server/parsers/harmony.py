"""The parser of gpt-oss' format: messages in channels, whose parts the tokenizer's special tokens mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from .items import Item, Reasoning, Span, ToolCall, Tools, first_tag, parsed, partial_tag

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNEL_OF = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT_OF = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """Reasoning in the channel `analysis`, calls in messages to `functions.NAME`, and text in other channels.

    Messages of one kind are joined by a line break. Text without any marker is an answer.

    Args:
        tools: that may be called.
        prompt_end: end of the prompt, which may have begun a message.
        separate: return `Reasoning`; otherwise reasoning is text, too.
    """

    TOKENS: ClassVar = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, tools: Tools, prompt_end: str = "", *, separate: bool = True) -> None:
        self._tools, self._separate = tools, separate
        self._text = ""  # not returned yet
        self._num_passed = 0  # characters that have left `_text`
        self._header: str | None = None  # of the message whose content follows; None: a header follows
        self._head = ""  # of the next message, as far as the prompt has it
        self._is_first = True  # in the first header, or in text without one
        self._said: set[type] = set()
        self._joint = ""  # goes before the next piece of the message
        self._spans: list[list[int | None]] = []
        begun = prompt_end.rpartition(START)[2] if START in prompt_end else ""
        if MESSAGE in begun:
            header, _, content = begun.partition(MESSAGE)
            if not first_tag(content, ENDS)[1]:
                self._open(header)
        else:
            self._head = begun.removeprefix("assistant")

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        return [(begin or 0, end) for begin, end in self._spans]

    def push(self, text: str) -> list[Item]:
        self._text += text
        found: list[Item] = []
        while self._content(found) if self._header is not None else self._read_header(found):
            pass
        return found

    # --- headers

    def _read_header(self, found: list[Item]) -> bool:
        """Read a header up to the content of its message. Return whether there is more to do."""
        if self._is_first and not self._head:
            begin = self._text.lstrip()
            markers = (CHANNEL, START, MESSAGE, CONSTRAIN, "to=", *ENDS)
            if not any(begin.startswith(marker) or marker.startswith(begin) for marker in markers):
                self._open("")
                return True
        at, tag = first_tag(self._text, (MESSAGE, *ENDS))
        if not tag:
            return False
        header = self._head + self._text[:at]
        begin_of_message = self._num_passed
        self._pass(at + len(tag))
        self._head, self._is_first = "", False
        if tag == MESSAGE:
            self._open(header.rpartition(START)[2], begin_of_message)
        return True

    def _open(self, header: str, begin: int = 0) -> None:
        self._header = header
        if self._is_reasoning and self._separate:
            self._spans.append([begin, None])
        kind = self._kind
        self._joint = "\n" if kind in self._said else ""

    @property
    def _is_reasoning(self) -> bool:
        channel = CHANNEL_OF.search(self._header or "")
        return channel is not None and channel[1] == "analysis" and self._tool is None

    @property
    def _kind(self) -> type:
        return Reasoning if self._is_reasoning and self._separate else str

    @property
    def _tool(self) -> str | None:
        recipient = RECIPIENT_OF.search(self._header or "")
        name = recipient[1].removeprefix("functions.") if recipient else None
        return name if name in self._tools else None

    # --- contents

    def _content(self, found: list[Item]) -> bool:
        """Read the content of a message. Return whether there is more to do."""
        ends = (*ENDS, START, CHANNEL) if self._is_first else (*ENDS, START)
        at, tag = first_tag(self._text, ends)
        if self._tool is not None:
            if not tag:
                return False
            found += self._call(self._text[:at])
        else:
            end = at if tag else len(self._text) - partial_tag(self._text, ends)
            found += self._said_text(self._text[:end])
            at = end
        self._pass(at)
        if not tag:
            return False
        self._pass(len(tag) if tag in ENDS else 0)
        if self._is_reasoning and self._separate:
            self._spans[-1][1] = self._num_passed
        self._header, self._is_first = None, False
        return True

    def _call(self, arguments: str) -> list[Item]:
        values = parsed(arguments) if arguments.strip() else {}
        if self._tool is None or not isinstance(values, dict):
            return self._said_text(arguments)
        return [ToolCall(self._tool, values)]

    def _said_text(self, text: str) -> list[Item]:
        if not text:
            return []
        text, self._joint = self._joint + text, ""
        self._said.add(self._kind)
        return [Reasoning(text) if self._kind is Reasoning else text]

    def _pass(self, count: int) -> None:
        self._num_passed += count
        self._text = self._text[count:]

    def finish(self) -> list[Item]:
        if self._header is None:
            is_plain = self._is_first and not self._head and not self._text.lstrip().startswith("<|")
            text, self._text = self._text, ""
            return [text] if text and is_plain else []
        text, self._text = self._text, ""
        return self._call(text) if self._tool is not None else self._said_text(text)
