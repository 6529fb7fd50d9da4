"""Parsers of tool calls that stand in sections of the text, each after a tag of its own."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from .items import (
    Item,
    ToolCall,
    Tools,
    WithoutReasoning,
    call_of,
    first_tag,
    held_back,
    parsed,
    partial_tag,
    typed_parameters,
)


class Section(NamedTuple):
    """A complete section: its calls (none if it is text), and the number of its characters, end tag included."""

    calls: Sequence[ToolCall]
    length: int


class Sections(WithoutReasoning, ABC):
    """Text with sections of calls. Whitespace next to a call is dropped. A section without a valid call is text.

    Attributes:
        BEGINS: tags at which sections begin.
        MARKERS: tags around several sections, which are dropped.
        TOKENS: all of its tags that may be special tokens.
    """

    TOKENS: ClassVar[Sequence[str]]
    BEGINS: Sequence[str]
    MARKERS: ClassVar[Sequence[str]] = ()

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""  # not returned yet; within a section it starts with whitespace, if any, and the tag
        self._begin = ""  # the tag of the current section
        self._content_at = 0  # where the content of that section starts
        self._after_call = False  # only whitespace since the last call
        self._tags = [*self.BEGINS, *self.MARKERS]

    @abstractmethod
    def _read(self, begin: str, content: str) -> Section | None:
        """Read the section that begins with this tag; None: its end is missing."""

    @abstractmethod
    def _read_cut(self, begin: str, content: str) -> Sequence[ToolCall]:
        """Read a section that is the end of the text, and whose end tag may be missing."""

    def push(self, text: str) -> list[Item]:
        self._text += text
        found: list[Item] = []
        while True:
            if self._after_call:
                self._text = self._text.lstrip()
                self._after_call = not self._text
            if not self._begin:
                at, tag = first_tag(self._text, self._tags)
                end = len(self._text[:at].rstrip()) if tag else len(self._text) - held_back(self._text, self._tags)
                if end:
                    found.append(self._text[:end])
                self._text, content_at = self._text[end:], at - end + len(tag)
                if not tag:
                    return found
                if tag in self.MARKERS:
                    self._text, self._after_call = self._text[content_at:], True
                    continue
                self._begin, self._content_at = tag, content_at
            section = self._read(self._begin, self._text[self._content_at :])
            if section is None:
                return found
            end = self._content_at + section.length
            found += section.calls or [self._text[:end]]
            self._begin, self._after_call, self._text = "", bool(section.calls), self._text[end:]

    def finish(self) -> list[Item]:
        if self._begin and (calls := self._read_cut(self._begin, self._text[self._content_at :])):
            return list(calls)
        return [self._text] if self._text else []


class Tagged(Sections):
    """Sections with an end tag each, of one call each.

    An end tag within a value of the call does not count.

    Attributes:
        TAGS: the end tag of each begin tag.
    """

    TAGS: ClassVar[Mapping[str, str]]

    def __init__(self, tools: Tools) -> None:
        self.BEGINS = tuple(self.TAGS)
        super().__init__(tools)
        self._search_from = 0

    @abstractmethod
    def _call(self, begin: str, content: str) -> ToolCall | None:
        """Read the call between the tags; None: it is none."""

    @abstractmethod
    def _is_in_value(self, content: str) -> bool:
        """Return whether the content ends within a value, where an end tag is a part of the value."""

    def _read(self, begin: str, content: str) -> Section | None:
        end = self.TAGS[begin]
        while (at := content.find(end, self._search_from)) >= 0:
            call = self._call(begin, content[:at])
            if call is not None or not self._is_in_value(content[:at]):
                self._search_from = 0
                return Section([call] if call else [], at + len(end))
            self._search_from = at + 1
        self._search_from = max(self._search_from, len(content) - len(end) + 1)
        return None

    def _read_cut(self, begin: str, content: str) -> Sequence[ToolCall]:
        kept = content[: len(content) - partial_tag(content, [self.TAGS[begin]])]
        call = self._call(begin, content) or self._call(begin, kept)
        return [call] if call else []


class JsonCalls(Tagged):
    """Calls whose arguments are JSON."""

    def _is_in_value(self, content: str) -> bool:
        quotes = content.replace("\\\\", "").replace('\\"', "").count('"')
        return quotes % 2 == 1


class Hermes(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen."""

    TAGS: ClassVar = {"<tool_call>": "</tool_call>"}
    TOKENS: ClassVar = ("<tool_call>", "</tool_call>")

    def _call(self, begin: str, content: str) -> ToolCall | None:
        return call_of(parsed(content), self._tools)


class DeepSeekV3(JsonCalls):
    """A call's type, its name, and its arguments as a block of Markdown: DeepSeek V3 and R1."""

    TAGS: ClassVar = {"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"}
    MARKERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    TOKENS: ClassVar = (*MARKERS, *TAGS, *TAGS.values(), "<｜tool▁sep｜>")

    def _call(self, begin: str, content: str) -> ToolCall | None:
        _, _, rest = content.partition("<｜tool▁sep｜>")
        name, _, block = rest.partition("\n")
        arguments = block.strip().removeprefix("```json").removesuffix("```")
        return call_of({"name": name.strip(), "arguments": arguments}, self._tools)


class DeepSeekV31(JsonCalls):
    """A call's name and its arguments: DeepSeek V3.1."""

    TAGS: ClassVar = DeepSeekV3.TAGS
    MARKERS = DeepSeekV3.MARKERS
    TOKENS: ClassVar = DeepSeekV3.TOKENS

    def _call(self, begin: str, content: str) -> ToolCall | None:
        name, _, arguments = content.partition("<｜tool▁sep｜>")
        return call_of({"name": name.strip(), "arguments": arguments}, self._tools)


class KimiK2(JsonCalls):
    """A call's id, `functions.NAME:INDEX`, and its arguments. The chat template expects that id again."""

    TAGS: ClassVar = {"<|tool_call_begin|>": "<|tool_call_end|>"}
    MARKERS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    TOKENS: ClassVar = (*MARKERS, *TAGS, *TAGS.values(), "<|tool_call_argument_begin|>")

    def _call(self, begin: str, content: str) -> ToolCall | None:
        call_id, _, arguments = content.partition("<|tool_call_argument_begin|>")
        name = call_id.strip().removeprefix("functions.").rpartition(":")[0]
        return call_of({"name": name, "arguments": arguments}, self._tools, call_id.strip())


class XmlCalls(Tagged):
    """Calls whose parameters are elements, and are typed by the tool's schema.

    Attributes:
        PARAMETER: the tags at which a parameter begins and ends.
    """

    PARAMETER: ClassVar[tuple[str, str]]

    def _is_in_value(self, content: str) -> bool:
        begin, end = self.PARAMETER
        return content.rfind(begin) > content.rfind(end)

    def _read_cut(self, begin: str, content: str) -> Sequence[ToolCall]:
        return []  # other parameters may have followed

    def _call_of(self, name: str, parameters: Mapping[str, str]) -> ToolCall | None:
        return ToolCall(name, typed_parameters(parameters, self._tools[name])) if name in self._tools else None


class Qwen3Coder(XmlCalls):
    """`<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>`, the outer tag optional."""

    TAGS: ClassVar = {"<tool_call>": "</tool_call>", "<function=": "</function>"}
    MARKERS = ("</tool_call>",)
    PARAMETER = ("<parameter=", "</parameter>")
    TOKENS: ClassVar = Hermes.TOKENS

    def _call(self, begin: str, content: str) -> ToolCall | None:
        if begin == "<tool_call>":
            content = content.strip()
            if not content.startswith("<function=") or not content.endswith("</function>"):
                return None
            content = content.removeprefix("<function=").removesuffix("</function>")
        head, *pieces = content.split("<parameter=")
        name, closed, rest = head.partition(">")
        if not closed or rest.strip():
            return None
        parameters = {}
        for piece in pieces:
            key, closed, value = piece.partition(">")
            before, tag, after = value.rpartition("</parameter>")
            if not closed or (tag and after.strip()):
                return None
            value = before if tag else after
            parameters[key.strip()] = value.removeprefix("\n").removesuffix("\n")
        return self._call_of(name.strip(), parameters)

    def _read_cut(self, begin: str, content: str) -> Sequence[ToolCall]:
        call = self._call(begin, content[: content.rfind("</function>") + 11]) if begin == "<tool_call>" else None
        return [call] if call else []


class Glm45(XmlCalls):
    """`<tool_call>NAME <arg_key>name</arg_key> <arg_value>value</arg_value> ...</tool_call>`."""

    TAGS: ClassVar = Hermes.TAGS
    PARAMETER = ("<arg_value>", "</arg_value>")
    _PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    TOKENS: ClassVar = (*Hermes.TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _call(self, begin: str, content: str) -> ToolCall | None:
        name, key, _ = content.partition("<arg_key>")
        at, parameters = len(name) if key else len(content), {}
        while pair := self._PAIR.match(content, at):
            parameters[pair[1].strip()] = pair[2]
            at = pair.end()
        return None if content[at:].strip() else self._call_of(name.strip(), parameters)


class MiniMaxM2(XmlCalls):
    """`<invoke name="NAME"><parameter name="NAME">value</parameter></invoke>`, between tags of its own."""

    TAGS: ClassVar = {'<invoke name="': "</invoke>"}
    MARKERS = ("<minimax:tool_call>", "</minimax:tool_call>")
    PARAMETER = ('<parameter name="', "</parameter>")
    _PAIR = re.compile(r'\s*<parameter name="([^"]*)">(.*?)</parameter>', re.DOTALL)
    TOKENS: ClassVar = MARKERS

    def _call(self, begin: str, content: str) -> ToolCall | None:
        name, closed, _ = content.partition('">')
        at, parameters = len(name) + len(closed), {}
        while pair := self._PAIR.match(content, at):
            parameters[pair[1]] = pair[2].removeprefix("\n").removesuffix("\n")
            at = pair.end()
        return self._call_of(name, parameters) if closed and not content[at:].strip() else None


class JsonEnd:
    """The end of a JSON object or list in a text that grows, whose characters are each looked at once."""

    _MARKS = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return where the value at the start of the text ends; None: it is incomplete."""
        while mark := self._MARKS.search(text, self._at):
            self._at = mark.end()
            if mark[0] == "\\":
                self._at += 1
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth <= 0:
                    return self._at
        self._at = max(self._at, len(text))
        return None


class Mistral(Sections):
    """`[TOOL_CALLS]` and a list of calls as JSON, or the name and the arguments of one call: `[TOOL_CALLS]f[ARGS]{}`.

    Ids of calls have 9 letters or digits, as Mistral's chat templates expect.
    """

    BEGINS = ("[TOOL_CALLS]",)
    TOKENS: ClassVar = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _HEAD = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
    _MAYBE_HEAD = re.compile(r"[\w.\-\[\]\s]*")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._end = JsonEnd()

    def _read(self, begin: str, content: str) -> Section | None:
        head = self._HEAD.match(content)
        start = head.end() if head else len(content) - len(content.lstrip())
        if content[start : start + 1] not in ("{", "["):
            maybe = self._MAYBE_HEAD.match(content)
            return None if maybe and maybe.end() == len(content) else Section([], 0)
        length = self._end.find(content[start:])
        if length is None:
            return None
        self._end = JsonEnd()
        value = parsed(content[start : start + length])
        if head:
            value = {"name": head[1], "arguments": value}
        values = value if isinstance(value, list) else [value]
        calls = [call_of(value, self._tools, self._id_of(value, head)) for value in values]
        return Section([call for call in calls if call] if all(calls) else [], start + length)

    def _id_of(self, value: object, head: re.Match[str] | None) -> str:
        given = head[2] if head else value.get("id") if isinstance(value, dict) else None
        is_id = isinstance(given, str) and re.fullmatch("[a-zA-Z0-9]{9}", given)
        return str(given) if is_id else "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _read_cut(self, begin: str, content: str) -> Sequence[ToolCall]:
        return []
