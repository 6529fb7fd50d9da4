"""Prompts and conversations of bodies, and their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...engine import Engine
from ...engine.text.prompts import TOKENIZER_ARGUMENTS
from .bodies import AllowedChoice, ConversationBody, PromptBody
from .errors import Object, RequestError, shown, unexpected, without_folders
from .settings import Settings

# Fields of a function, next to its name, that may be missing or null.
FUNCTION_FIELDS: dict[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}


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
    tools: dict[str, Any]  # the parameters of each, by its name
    must_call: bool
    effort: str | None  # of reasoning
    effort_field: str

    @property
    def continued(self) -> str | None:
        """The text of the message that the answer continues; None: it is a message of its own."""
        return str(self.messages[-1]["content"]) if self.options.get("continue_final_message") else None

    def tokenize(self, engine: Engine) -> list[list[int]]:
        template = str(self.options.get("chat_template") or getattr(engine.tokenizer, "chat_template", None) or "")
        options = options_of_effort(self.effort, self.effort_field, template) | self.options
        messages = self.messages
        if "developer" not in template:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            engine.core.inputs.check_conversation(messages, options)
        except ValueError as error:
            raise RequestError(str(error), str(error).partition(" ")[0]) from error
        try:
            tokens = engine.core.inputs.tokenize_chat(messages, options)
        except Exception as error:  # a template may raise anything
            raise RequestError(
                f"messages do not fit the chat template: {without_folders(str(error))}", "messages"
            ) from error
        return checked_tokens(engine, [tokens], ["messages"], False)


def options_of_effort(effort: str | None, field: str, template: str) -> Object:
    """Return the variables of a chat template that ask for an effort of reasoning, or switch reasoning on or off."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    for switch in ("enable_thinking", "thinking"):
        if re.search(rf"\b{switch}\b", template):
            return {switch: effort != "none"}
    expected = "medium" if "<think>" in template else "none"
    if effort not in ("medium", expected):
        raise unexpected(field, effort, f'none or "{expected}" (the chat template does not read it)')
    return {}


def check_functions(tools: Sequence[Object]) -> None:
    """Refuse a function with a field of another type than OpenAI's; chat templates get its fields as they are given."""
    for index, tool in enumerate(tools):
        for name, (kind, expected) in FUNCTION_FIELDS.items():
            value = tool["function"].get(name)
            if value is not None and not isinstance(value, kind):
                raise unexpected(f"tools[{index}].function.{name}", value, expected)


def read_tool_choice(body: ConversationBody) -> tuple[list[Object], bool]:
    """Return the tools that may be called, and whether one of them must be."""
    tools, choice = body.tools, body.tool_choice
    if choice in ("auto", "none"):
        return (tools if choice == "auto" else []), False
    wanted: list[str] | None = None
    if isinstance(choice, AllowedChoice):
        wanted = [tool["function"]["name"] for tool in choice.allowed_tools.tools]
    elif not isinstance(choice, str):
        wanted = [choice["function"]["name"]]
    names = [tool["function"]["name"] for tool in tools]
    must_call = not isinstance(choice, AllowedChoice) or choice.allowed_tools.mode == "required"
    allowed = [tool for tool in tools if wanted is None or tool["function"]["name"] in wanted]
    if not set(wanted or ()) <= set(names) or (must_call and not allowed):
        given = choice.model_dump() if isinstance(choice, AllowedChoice) else choice
        raise unexpected("tool_choice", given, f"one of tools, which are {shown(names)}")
    return allowed, must_call


def read_conversation(body: ConversationBody, settings: Settings) -> Conversation:
    """Read messages, tools and the arguments of the chat template."""
    if not body.messages:
        raise unexpected("messages", [], "at least 1 message")
    check_functions(body.tools)
    tools, must_call = read_tool_choice(body)
    options = dict(body.chat_template_kwargs)
    for reserved in options:
        if reserved in ("chat_template", "tools") or reserved in TOKENIZER_ARGUMENTS:
            raise unexpected(f"chat_template_kwargs.{reserved}", options[reserved], "none")
    if settings.chat_template is not None:
        options["chat_template"] = settings.chat_template
    if tools:
        options["tools"] = tools
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in body.model_fields_set:
            options[name] = getattr(body, name)
    messages = [message.as_dict() for message in body.messages]
    effort, field = read_effort(body)
    return Conversation(messages, options, parameters_of(tools), must_call, effort, field)


def read_effort(body: ConversationBody) -> tuple[str | None, str]:
    """Return the effort of reasoning, and the field that has it."""
    field, own = "reasoning_effort", body.reasoning_effort
    given = None if body.reasoning is None else body.reasoning.as_effort()
    if given is None:
        return own, field
    if own not in (None, given):
        raise unexpected(field, own, f"none or {shown(given)} with reasoning")
    return given, "reasoning.effort"


def parameters_of(tools: Sequence[Object]) -> dict[str, Any]:
    """Return the JSON schema of the parameters of each tool, by its name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}


def checked_tokens(engine: Engine, prompts: list[Any], names: list[str], special: bool) -> list[list[int]]:
    try:
        return engine.core.inputs.tokenize(prompts, names, special)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error), re.split(r"\W", names[0])[0]) from error
