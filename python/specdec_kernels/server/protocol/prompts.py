"""Prompts and conversations of bodies, and their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...engine import Engine
from ...engine.text.prompts import TOKENIZER_ARGUMENTS
from .bodies import ConversationBody, PromptBody
from .errors import Object, RequestError, shown, unexpected
from .settings import Settings


@dataclass(frozen=True)
class Prompts:
    """Prompts of a completion, each a text or token ids, and what error messages call them."""

    prompts: list[Any]
    names: list[str]
    add_special_tokens: bool

    def tokenize(self, engine: Engine) -> list[list[int]]:
        return checked_tokens(engine, self.prompts, self.names, self.add_special_tokens)


def read_prompts(body: PromptBody) -> Prompts:
    """Read one prompt or several."""
    prompt = body.prompt
    is_one = isinstance(prompt, str) or is_token(prompt[0])
    prompts = [prompt] if is_one else list(prompt)
    names = ["prompt"] if is_one else [f"prompt[{index}]" for index in range(len(prompts))]
    for name, one in zip(names, prompts, strict=True):
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(is_token, one))):
            raise unexpected(name, one, "a string or a list of token ids")
    return Prompts(prompts, names, body.add_special_tokens)


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Conversation:
    """Messages, and the arguments of the chat template."""

    messages: list[Object]
    options: Object
    tools: Sequence[str]
    must_call: bool

    def tokenize(self, engine: Engine) -> list[list[int]]:
        try:
            engine.core.inputs.check_conversation(self.messages, self.options)
        except ValueError as error:
            raise RequestError(str(error), str(error).partition(" ")[0]) from error
        try:
            tokens = engine.core.inputs.tokenize_chat(self.messages, self.options)
        except Exception as error:  # a template may raise anything
            raise RequestError(f"messages do not fit the chat template: {error}", "messages") from error
        return checked_tokens(engine, [tokens], ["messages"], False)


def read_conversation(body: ConversationBody, settings: Settings) -> Conversation:
    if not body.messages:
        raise unexpected("messages", [], "at least 1 message")
    tools, choice = body.tools, body.tool_choice
    must_call = choice not in ("auto", "none")
    if must_call:
        wanted = None if isinstance(choice, str) else choice["function"]["name"]
        names = [tool["function"]["name"] for tool in tools]
        if not names or wanted not in (None, *names):
            raise unexpected("tool_choice", choice, f"one of tools, which are {shown(names)}")
        tools = [tool for tool in tools if wanted in (None, tool["function"]["name"])]
    options = dict(body.chat_template_kwargs)
    for reserved in options:
        if reserved in ("chat_template", "tools") or reserved in TOKENIZER_ARGUMENTS:
            raise unexpected(f"chat_template_kwargs.{reserved}", options[reserved], "none")
    if settings.chat_template is not None:
        options["chat_template"] = settings.chat_template
    if choice == "none":
        tools = []
    if tools:
        options["tools"] = tools
    messages = [message.as_dict() for message in body.messages]
    return Conversation(messages, options, [tool["function"]["name"] for tool in tools], must_call)


def checked_tokens(engine: Engine, prompts: list[Any], names: list[str], special: bool) -> list[list[int]]:
    try:
        return engine.core.inputs.tokenize(prompts, names, special)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error), re.split(r"\W", names[0])[0]) from error
