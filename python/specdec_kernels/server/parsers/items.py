"""The items of generated text (text, reasoning, tool calls), and the base of their parsers."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import strict_json

Tools = Mapping[str, Any]  # the JSON schema of each tool's parameters, by its name
Span = tuple[int, "int | None"]  # characters from the first up to the second (exclusive); None: to the end


class ToolCall(dict[str, Any]):
    """A tool call in OpenAI's form."""

    def __init__(self, name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> None:
        function = {"name": name, "arguments": strict_json.dumps(arguments)}
        super().__init__(id=call_id or f"call_{secrets.token_hex(12)}", type="function", function=function)

    @property
    def name(self) -> str:
        """The tool."""
        return str(self["function"]["name"])

    @property
    def arguments(self) -> str:
        """Its arguments as JSON."""
        return str(self["function"]["arguments"])


@dataclass(frozen=True)
class Reasoning:
    """Text that a model writes before its answer."""

    text: str


Item = str | Reasoning | ToolCall


class Parser(Protocol):
    """A streaming parser of generated text. Items come out in the order of the text, however it is cut in pieces."""

    def push(self, text: str) -> list[Item]:
        """Parse more text, and return what is complete."""
        ...

    def finish(self) -> list[Item]:
        """Return what was held back."""
        ...

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        """The ranges of the text so far that are reasoning, tags included."""
        ...


class WithoutReasoning:
    """A parser of text without reasoning."""

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        return ()


def partial_tag(text: str, tags: Sequence[str]) -> int:
    """Count the characters at the end of a text that may be the start of a tag."""
    longest = min(max(map(len, tags)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def held_back(text: str, tags: Sequence[str]) -> int:
    """Count the characters at the end that may be the start of a tag, or whitespace before it."""
    partial = partial_tag(text, tags)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())


def first_tag(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return place and name of the first tag in a text, the longest of those that begin there; "": no tag."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    at, _, tag = min(found, default=(-1, 0, ""))
    return at, tag


def parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any, tools: Tools, call_id: str | None = None) -> ToolCall | None:
    """Convert an object with `name` and `arguments` to a call of one of the tools; None if it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    return ToolCall(name, arguments, call_id) if isinstance(arguments, dict) else None


# --- parameters that are written as text

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def typed_parameters(parameters: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """Convert parameters that are written as text to the types of their JSON schema."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        properties = {}
    return {name: typed(text, properties.get(name), schema) for name, text in parameters.items()}


def typed(text: str, schema: Any, root: Any) -> Any:
    """Convert a text to a type that its schema allows; one that fits none stays text."""
    kinds = kinds_of(schema, root)
    if kinds <= {"string"}:
        return text
    value = literal(text.strip())
    kind = "null" if value is None else KINDS[type(value)]
    if kind in kinds or (kind == "integer" and "number" in kinds):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    return text


def kinds_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return the types that a JSON schema allows, as far as it says so by name, choices, values or references."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    kinds: set[str] = set()
    given = schema.get("type")
    kinds.update(kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
    values = schema.get("enum")
    for value in [*(values if isinstance(values, list) else []), *([schema["const"]] if "const" in schema else [])]:
        kinds.add("null" if value is None else KINDS.get(type(value), "string"))
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else []:
            kinds |= kinds_of(member, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        place = root
        for key in reference.split("/")[1:]:
            place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
        kinds |= kinds_of(place, root, depth + 1)
    return kinds


def literal(text: str) -> Any:
    """Read a value of JSON or Python; one that is neither is the text itself."""
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):
        pass
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
        strict_json.loads(strict_json.dumps(value))  # no set, no bytes, no infinity
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return list(value) if isinstance(value, tuple) else value
