"""What the body of a request asks for: prompts, how they are decoded, and in which form the answer is wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..engine import Engine, SamplingParams
from ..engine.params import MAX_LOGPROBS
from .fields import (
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    OBJECT,
    SPECULATION,
    STOP,
    TEXT,
    TOKENS,
    Fields,
    Kind,
    RequestError,
    at_most,
    is_integer,
    is_text,
    list_of,
    one_of,
    shown,
)


@dataclass(frozen=True)
class Settings:
    """What a server is started with, beside its engine.

    Attributes:
        model_name: by which clients call the model. api_key: what they have to send; None: nothing.
        defaults: parameters of requests that do not give them, by the names of `SamplingParams`.
        chat_template: in place of the tokenizer's. tool_parser: "hermes" or "llama3"; None: by the chat template.
        max_queued: requests that may wait for a slot; who comes beyond that is sent away with 429.
        max_body_bytes, max_prompt_tokens, max_n: of one request. max_prompt_tokens None: what the engine holds.
    """

    model_name: str
    api_key: str | None = None
    defaults: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    chat_template: str | None = None
    tool_parser: str | None = None
    max_queued: int = 2048
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_n: int = 128


@dataclass(frozen=True)
class Asked:
    """One request's wishes, all of them checked.

    Attributes:
        tokens: makes the prompts' tokens, which may take a while. params: of every prompt, its choices among them.
        names: of the fields that parameters came from.
        stream, include_usage, include_rounds, usage_each_time: how the answer is sent; with rounds, it says how many
            tokens each gave, and which text was drafted.
        num_top: alternatives beside each token, -1: no log-probabilities. tools: names of those that may be called.
        must_call: the text is a call of one of them, as JSON.
    """

    tokens: Callable[[Engine], list[list[int]]]
    params: SamplingParams
    names: dict[str, str]
    stream: bool
    include_usage: bool
    include_rounds: bool
    usage_each_time: bool = False
    num_top: int = -1
    tools: Sequence[str] = ()
    must_call: bool = False

    def refused(self, error: ValueError) -> RequestError:
        """What the engine has against the parameters, by the names of the body's fields."""
        return renamed(error, self.names)


SAMPLING: dict[str, tuple[str, Kind]] = {
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "top_k": ("top_k", INTEGER),
    "min_p": ("min_p", NUMBER),
    "seed": ("seed", INTEGER),
    "stop": ("stop", STOP),
    "stop_token_ids": ("stop_token_ids", TOKENS),
    "ignore_eos": ("ignore_eos", BOOLEAN),
    "min_tokens": ("min_new_tokens", INTEGER),
    "priority": ("priority", INTEGER),
    "timeout": ("timeout", NUMBER),
    "speculation": ("speculation", SPECULATION),
    "presence_penalty": ("presence_penalty", NUMBER),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "repetition_penalty": ("repetition_penalty", NUMBER),
    "logit_bias": ("logit_bias", OBJECT),
    "regex": ("regex", TEXT),
    "ebnf": ("grammar", TEXT),
}

# What clients send without asking for anything.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
ANYTHING = Kind("anything", lambda _: True)
TOOL_CHOICE = Kind(
    '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
    lambda value: value in ("auto", "none", "required") or is_function(value),
)
NUM_TOP = Kind(f"0 to {MAX_LOGPROBS}", lambda n: is_integer(n) and 0 <= n <= MAX_LOGPROBS)
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


def read_chat(body: Fields, settings: Settings, engine: Engine) -> Asked:
    """The body of `/v1/chat/completions`."""
    check_model(body, settings)
    with_logprobs = body.take("logprobs", BOOLEAN, False)
    num_top = body.take("top_logprobs", NUM_TOP)
    if num_top and not with_logprobs:
        raise RequestError(f"top_logprobs is {num_top}, expected logprobs true beside it", "top_logprobs")
    conversation = read_conversation(body, settings)
    names = ("max_completion_tokens", "max_tokens")
    return read_rest(
        body, settings, engine, conversation.tokens, names, None, (num_top or 0) if with_logprobs else -1, conversation
    )


def read_completion(body: Fields, settings: Settings, engine: Engine) -> Asked:
    """The body of `/v1/completions`."""
    check_model(body, settings)
    num_top = body.take("logprobs", NUM_TOP, -1)
    return read_rest(body, settings, engine, read_prompts(body), ("max_tokens",), 16, num_top)


def read_rest(
    body: Fields,
    settings: Settings,
    engine: Engine,
    tokens: Callable[[Engine], list[list[int]]],
    names_of_budget: Sequence[str],
    budget: int | None,
    num_top: int,
    conversation: Conversation | None = None,
) -> Asked:
    """What both kinds of bodies have, after their own fields were taken."""
    stream = body.take("stream", BOOLEAN, False)
    options = Fields(body.take("stream_options", OBJECT, {}), "stream_options.")
    tools = conversation.tools if conversation else ()
    include_usage = options.take("include_usage", BOOLEAN, False)
    include_rounds = options.take("include_rounds", BOOLEAN, False)
    usage_each_time = options.take("continuous_usage_stats", BOOLEAN, False)
    if include_rounds and tools:
        raise options.error("include_rounds", True, "false with tools")
    options.expect_no_more()
    params, names = read_sampling(body, settings, engine, names_of_budget, budget, num_top, conversation)
    for name, values in WITHOUT_EFFECT.items():
        body.without_effect(name, *values)
    for name in IGNORED:
        body.take(name, ANYTHING)
    body.expect_no_more()
    must_call = conversation is not None and conversation.must_call
    return Asked(
        tokens,
        params,
        names,
        stream=stream,
        include_usage=include_usage,
        include_rounds=include_rounds,
        usage_each_time=usage_each_time,
        num_top=num_top,
        tools=tools,
        must_call=must_call,
    )


def check_model(body: Fields, settings: Settings) -> None:
    name = body.take("model", TEXT, settings.model_name)
    if name != settings.model_name:
        message = f"model is {shown(name)}, expected {shown(settings.model_name)}"
        raise RequestError(message, "model", status=404, code="model_not_found")


# --- how it is decoded


def read_sampling(
    body: Fields,
    settings: Settings,
    engine: Engine,
    names_of_budget: Sequence[str],
    budget: int | None,
    num_top: int,
    conversation: Conversation | None,
) -> tuple[SamplingParams, dict[str, str]]:
    """The parameters, and of which fields they came."""
    values = dict(settings.defaults)
    names: dict[str, str] = {}
    values["n"] = body.take("n", at_most(settings.max_n), 1)
    for name, (parameter, kind) in SAMPLING.items():
        if name in body:
            values[parameter] = body.take(name, kind)
            names[parameter] = name
    max_len = engine.config.max_len
    for name in names_of_budget:
        if name in body:
            budget = body.take(name, INTEGER)
            names["max_new_tokens"] = name
    values["max_new_tokens"] = max_len if budget is None else min(budget, max_len)
    if values.get("top_k") == -1:  # how others write it
        values["top_k"] = 0
    if "stop_token_ids" in values and not values.get("ignore_eos"):
        values["stop_token_ids"] = [*engine.eos_token_ids, *values["stop_token_ids"]]
    if "logit_bias" in values:
        values["logit_bias"] = read_bias(values["logit_bias"])
    values["logprobs"] = None if num_top < 0 else num_top
    if (schema := read_format(body)) is not None:
        values["json_schema"], names["json_schema"] = schema, "response_format"
    if conversation is not None:
        if conversation.must_call:
            if schema is not None:
                raise RequestError(
                    "response_format is given, expected none beside a forced tool_choice", "response_format"
                )
            values["json_schema"], names["json_schema"] = schema_of_calls(conversation.options["tools"]), "tool_choice"
        if "prediction" in body:
            values["prediction"], names["prediction"] = read_prediction(body), "prediction"
    try:
        params = SamplingParams(**values)
        engine.core.inputs.check_params(params)
    except ValueError as error:
        raise renamed(error, names) from error
    return params, names


def renamed(error: ValueError, names: dict[str, str]) -> RequestError:
    """An error of `SamplingParams`, with the names of a body's fields."""
    message = str(error).removeprefix("SamplingParams: ")
    param = message.split(" ", 1)[0]
    for parameter, name in names.items():
        message = re.sub(rf"\b{parameter}\b", name, message)
    return RequestError(message, names.get(param, param))


def read_bias(bias: dict[str, Any]) -> dict[int, float]:
    for token, value in bias.items():
        if not token.isdecimal() or not NUMBER.holds(value):
            expected = "token ids with a number each"
            raise RequestError(f"logit_bias has {shown(token)}: {shown(value)}, expected {expected}", "logit_bias")
    return {int(token): float(value) for token, value in bias.items()}


def read_format(body: Fields) -> dict[str, Any] | None:
    """The schema that `response_format` asks for; None: any text will do."""
    given = body.take("response_format", OBJECT)
    if given is None:
        return None
    fields = Fields(given, "response_format.")
    kind = fields.need("type", one_of("text", "json_object", "json_schema"))
    schema: dict[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        described = Fields(fields.need("json_schema", OBJECT), "response_format.json_schema.")
        schema = described.need("schema", OBJECT)
        for name, kind_of in (("name", TEXT), ("description", TEXT), ("strict", BOOLEAN)):
            described.take(name, kind_of)
        described.expect_no_more()
    fields.expect_no_more()
    return schema


def schema_of_calls(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def read_prediction(body: Fields) -> str:
    """The text that much of the answer will repeat: it is what the n-gram index drafts from."""
    fields = Fields(body.take("prediction", OBJECT), "prediction.")
    fields.need("type", one_of("content"))
    content = fields.need("content", Kind("a string or a list of parts", lambda value: isinstance(value, str | list)))
    fields.expect_no_more()
    if isinstance(content, list):
        content = "".join(text_of(part, f"prediction.content[{i}]") for i, part in enumerate(content))
    return str(content)


# --- prompts


def read_prompts(body: Fields) -> Callable[[Engine], list[list[int]]]:
    """The prompts of a completion: texts or token ids, one or several."""
    kind = Kind(
        "a string, a list of token ids, or a list of either",
        lambda value: is_text(value) or (isinstance(value, list) and bool(value)),
    )
    prompt = body.need("prompt", kind)
    prompts = [prompt] if is_text(prompt) or is_integer(prompt[0]) else prompt
    for index, one in enumerate(prompts):
        if not is_text(one) and not list_of(is_integer)(one):
            where = "prompt" if prompts[0] is prompt else f"prompt[{index}]"
            raise RequestError(f"{where} is {shown(one)}, expected a string or a list of token ids", "prompt")
    names = ["prompt"] if prompts[0] is prompt else [f"prompt[{i}]" for i in range(len(prompts))]
    special = body.take("add_special_tokens", BOOLEAN, True)
    return lambda engine: checked_tokens(engine, prompts, names, special)


@dataclass(frozen=True)
class Conversation:
    """Messages, and what a chat template makes them tokens with."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    tools: Sequence[str]
    must_call: bool

    def tokens(self, engine: Engine) -> list[list[int]]:
        try:
            tokens = engine.core.inputs.tokenize_chat(self.messages, self.options)
        except Exception as error:  # a template may refuse messages, in its own way
            raise RequestError(f"messages do not fit the chat template: {error}", "messages") from error
        return checked_tokens(engine, [tokens], ["messages"], False)


def read_conversation(body: Fields, settings: Settings) -> Conversation:
    messages = [
        read_message(message, f"messages[{index}]") for index, message in enumerate(body.need("messages", LIST))
    ]
    if not messages:
        raise RequestError("messages is [], expected at least 1 message", "messages")
    tools = read_tools(body)
    choice = body.take("tool_choice", TOOL_CHOICE, "auto")
    if choice not in ("auto", "none"):
        wanted = None if choice == "required" else choice["function"]["name"]
        names = [tool["function"]["name"] for tool in tools]
        if not names or (wanted is not None and wanted not in names):
            raise RequestError(
                f"tool_choice is {shown(choice)}, expected one of tools, which are {shown(names)}", "tool_choice"
            )
        tools = [tool for tool in tools if wanted in (None, tool["function"]["name"])]
    options = dict(body.take("chat_template_kwargs", OBJECT, {}))
    for reserved in ("chat_template", "tools", "tokenize", "return_dict", "conversation"):
        if reserved in options:
            where = f"chat_template_kwargs.{reserved}"
            raise RequestError(f"{where} is {shown(options[reserved])}, expected none", where)
    if settings.chat_template is not None:
        options["chat_template"] = settings.chat_template
    if choice == "none":
        tools = []
    if tools:
        options["tools"] = tools
    must_call = choice not in ("auto", "none")
    return Conversation(messages, options, [tool["function"]["name"] for tool in tools], must_call)


def read_message(message: Any, where: str) -> dict[str, Any]:
    """A message as chat templates take it: content is one text, the arguments of calls are objects."""
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {shown(message)}, expected an object", "messages")
    Fields(message, f"{where}.").need("role", TEXT)
    read = {name: value for name, value in message.items() if value is not None}
    content = read.get("content", "")
    if isinstance(content, list):
        content = "\n".join(text_of(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not is_text(content):
        raise RequestError(f"{where}.content is {shown(content)}, expected a string or a list of parts", "messages")
    read["content"] = content
    if "tool_calls" in read:
        read["tool_calls"] = [read_call(call, f"{where}.tool_calls") for call in as_list(read["tool_calls"], where)]
    return read


def text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not is_text(part.get("text")):
        raise RequestError(f'{where} is {shown(part)}, expected {{"type": "text", "text": ...}}', "messages")
    return str(part["text"])


def as_list(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls is {shown(calls)}, expected a list", "messages")
    return calls


def read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise RequestError(f"{where} has {shown(call)}, expected a function with its name", "messages")
    arguments = function.get("arguments", {})
    if is_text(arguments):
        with suppress(ValueError):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} has arguments {shown(arguments)}, expected an object as JSON", "messages")
    return {**call, "function": function | {"arguments": arguments}}


def is_function(value: Any) -> bool:
    """Whether it names a function, as a tool or as the choice of one."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and is_text(function.get("name"))


def read_tools(body: Fields) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = body.take("tools", LIST, [])
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not is_function(tool):
            expected = '{"type": "function", "function": {"name": ...}}'
            raise RequestError(f"{where} is {shown(tool)}, expected {expected}", "tools")
    return tools


def checked_tokens(engine: Engine, prompts: list[Any], names: list[str], special: bool) -> list[list[int]]:
    try:
        return engine.core.inputs.tokenize(prompts, names, special)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error), re.split(r"\W", names[0])[0]) from error
