"""Input items, and the messages of a chat that they become."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .. import strict_json
from ..protocol import Object, RequestError, unexpected

ROLES = ("user", "assistant", "system", "developer")
KINDS = "a message, function_call, function_call_output, reasoning or item_reference"
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
MAX_ITEMS = 10_000
Lookup = Callable[[str], "Object | None"]


def new_id(kind: str) -> str:
    """Return an id with OpenAI's prefix for a kind of item."""
    return f"{kind}_{secrets.token_hex(16)}"


def read_items(given: str | Sequence[Any], stored_item: Lookup) -> list[Object]:
    """Validate input and return it as items of OpenAI's form; `stored_item` finds those that are given by reference.

    Raises:
        RequestError: an item that is of no known kind, or is none of its kind.
    """
    if isinstance(given, str):
        return [message_item("user", given)]
    if len(given) > MAX_ITEMS:
        raise RequestError(f"input has {len(given)} items, expected at most {MAX_ITEMS}", "input")
    return [read_item(item, f"input[{index}]", stored_item) for index, item in enumerate(given)]


def read_item(item: Any, where: str, stored_item: Lookup) -> Object:
    """Validate one item."""
    if not isinstance(item, dict):
        raise unexpected(where, item, KINDS)
    kind = item.get("type") or ("message" if "role" in item else None)
    given_id = item.get("id")
    if given_id is not None and not isinstance(given_id, str):
        raise unexpected(f"{where}.id", given_id, "a string")
    if kind == "message":
        if item.get("role") not in ROLES:
            raise unexpected(f"{where}.role", item.get("role"), f"one of {', '.join(ROLES)}")
        text = text_of(item.get("content"), f"{where}.content")
        return message_item(item["role"], text, given_id)
    if kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise unexpected(f"{where}.{name}", item.get(name), "a string")
        if parsed_arguments(item["arguments"]) is None:
            raise unexpected(f"{where}.arguments", item["arguments"], "an object as JSON")
        return call_item(item["call_id"], item["name"], item["arguments"], given_id)
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise unexpected(f"{where}.call_id", item.get("call_id"), "a string")
        output = text_of(item.get("output"), f"{where}.output")
        fields = {"id": given_id or new_id("fco"), "type": kind, "call_id": item["call_id"]}
        return {**fields, "output": output, "status": "completed"}
    if kind == "reasoning":
        text = text_of(item.get("content") or item.get("summary") or [], f"{where}.content")
        return reasoning_item(text, given_id)
    if kind == "item_reference":
        found = stored_item(given_id or "")
        if found is None:
            raise unexpected(f"{where}.id", given_id, "that of an item of a stored response")
        return found
    raise unexpected(where, item, KINDS)


def text_of(content: Any, where: str) -> str:
    """Return the text of a content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unexpected(where, content, "a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*TEXTS, "refusal") or not isinstance(text, str):
            raise unexpected(f"{where}[{index}]", part, '{"type": "input_text", "text": ...}')
        texts.append(text)
    return "\n".join(texts)


def parsed_arguments(arguments: str) -> Object | None:
    """Parse the arguments of a call; None: they are no object."""
    with suppress(ValueError, RecursionError):
        value = strict_json.loads(arguments or "{}")
        return value if isinstance(value, dict) else None
    return None


def message_item(role: str, text: str, item_id: str | None = None) -> Object:
    """Return a message with one text."""
    part: Object = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    fields = {"id": item_id or new_id("msg"), "type": "message", "role": role}
    return {**fields, "status": "completed", "content": [part]}


def call_item(call_id: str, name: str, arguments: str, item_id: str | None = None) -> Object:
    """Return a call of a function."""
    fields = {"id": item_id or new_id("fc"), "type": "function_call", "call_id": call_id, "name": name}
    return {**fields, "arguments": arguments, "status": "completed"}


def reasoning_item(text: str, item_id: str | None = None) -> Object:
    """Return a reasoning item with one text."""
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id or new_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": "completed",
    }


def as_messages(items: Sequence[Object]) -> list[Object]:
    """Return the messages of a chat. Reasoning, text and calls that follow each other are one message."""
    messages: list[Object] = []
    turn: Object | None = None  # the assistant's message that further items are a part of
    for item in items:
        kind = item["type"]
        text = item["content"][0]["text"] if item.get("content") else ""
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            role = {"role": "tool", "tool_call_id": item["call_id"]} if kind != "message" else {"role": item["role"]}
            messages.append({**role, "content": text if kind == "message" else item["output"]})
            turn = None
            continue
        is_answered = turn is not None and (turn["content"] or "tool_calls" in turn)
        if turn is None or kind == "reasoning" or (kind == "message" and is_answered):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "reasoning":
            turn["reasoning_content"] = text
        elif kind == "message":
            turn["content"] = text
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return messages
