"""Request bodies of the HTTP API: pydantic models of OpenAI's fields, and their requests to the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Len, Predicate
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..engine import Engine, SamplingParams
from ..engine.params import MAX_LOGPROBS
from ..engine.text.json_schemas import escaped, moved
from ..engine.text.prompts import TOKENIZER_ARGUMENTS
from . import strict_json


@dataclass(frozen=True)
class Settings:
    """Options of a server, apart from its engine.

    Attributes:
        model_name: name by which clients address the model.
        api_key: key that they must send; None: none.
        defaults: sampling parameters of requests that do not give them, by the names of `SamplingParams`.
        chat_template: replaces the tokenizer's.
        tool_parser: "hermes" or "llama3"; None: found from the template.
        max_queued: requests that may wait for a slot; further ones get 429.
        max_body_bytes: limit of one request's body.
        max_prompt_tokens: limit of one request's prompt; None: the engine's limit.
        max_n: limit of one request's choices.
    """

    model_name: str
    api_key: str | None = None
    defaults: Object = field(default_factory=lambda: {"temperature": 1.0})
    chat_template: str | None = None
    tool_parser: str | None = None
    max_queued: int = 2048
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_n: int = 128


# --- errors


class RequestError(Exception):
    """An error response in OpenAI's form.

    Attributes:
        status: HTTP status.
        param: the field at fault.
        code: OpenAI's error code.
        headers: headers of the response.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.headers = param, status, code, headers

    @property
    def body(self) -> Object:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unexpected(where: str, value: Any, expected: str) -> RequestError:
    """Return the error of a field, or of an element of a list; a field that is None is missing."""
    found = "missing" if value is None and not where.endswith("]") else shown(value)
    return RequestError(f"{where} is {found}, expected {expected}", where.partition("[")[0])


def shown(value: Any) -> str:
    """Format a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_body(body: bytes) -> Object:
    """Parse a JSON object; RequestError if it is none, if a string is no valid Unicode or a number is too large."""
    try:
        values = strict_json.loads(body, parse_int)
        if b"\\u" in body:
            json.dumps(values, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error}), expected a JSON object") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body is {shown(values)}, expected a JSON object")
    return values


def parse_int(digits: str) -> int:
    """Parse an integer of a body. None means more than 64 bits, and Python's own limit is 4300 digits."""
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"the integer {digits[:40]} has more than 64 bits")
    return int(digits)


# --- models of bodies


@dataclass(frozen=True)
class Expected:
    """Replace the errors of an annotated type by one that states what is expected."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "expected", custom_error_message=self.words)


# Expected values, by pydantic's types of errors. Messages of other errors are the expected value.
EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "string_type": "a string",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "extra_forbidden": "none (this field is not supported)",
}
REQUIRED: Any = Field(None, validate_default=True)  # so that a missing field fails as null does


class Body(BaseModel, extra="forbid"):
    """A JSON object. A field that is null counts as missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


def is_function(value: Any) -> bool:
    """Return whether an object names a function, as a tool or as `tool_choice`."""
    function = value.get("function") if value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def as_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise PydanticCustomError("content", "a string or a list of parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def read_call(call: Any) -> Object:
    """Parse the arguments of a tool call: chat templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PydanticCustomError("call", "a function with its name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = strict_json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise PydanticCustomError("arguments", "arguments that are an object as JSON")
    return {**call, "function": function | {"arguments": arguments}}


FUNCTION = '{"type": "function", "function": {"name": ...}}'
Object = dict[str, Any]
Number = Annotated[StrictInt | StrictFloat, Expected("a number")]
Tokens = Annotated[list[StrictInt], Expected("a list of token ids")]
Stop = Annotated[StrictStr | list[StrictStr], Expected("a string or a list of strings")]
Speculation = Annotated[Literal["on", "off"] | StrictInt, Expected('"on", "off" or a number of nodes')]
NumTop = Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS), Expected(f"0 to {MAX_LOGPROBS}")]
Function = Annotated[Object, Predicate(is_function)]
ToolChoice = Annotated[
    Literal["auto", "none", "required"] | Function, Expected(f'"auto", "none", "required" or {FUNCTION}')
]
Prompt = Annotated[
    StrictStr | Annotated[list[Any], Len(1)], Expected("a string, a list of token ids, or a list of either")
]
Unsupported = Expected(EXPECTED["extra_forbidden"])  # for fields of which only values without effect are accepted


class TextPart(Body, extra="ignore"):
    type: Literal["text"]
    text: StrictStr


Content = Annotated[list[Annotated[TextPart, Expected('{"type": "text", "text": ...}')]], BeforeValidator(as_parts)]


class Message(Body, extra="allow"):
    role: StrictStr = REQUIRED
    content: Content = []
    tool_calls: list[Annotated[Object, BeforeValidator(read_call)]] | None = None

    def as_dict(self) -> Object:
        """Return the message for chat templates, its content as one text."""
        return {k: v for k, v in self if v is not None} | {"content": "\n".join(part.text for part in self.content)}


class StreamOptions(Body):
    include_usage: StrictBool = False
    include_rounds: StrictBool = False
    continuous_usage_stats: StrictBool = False


class JsonSchema(Body):
    definition: Object | None = Field(None, alias="schema")  # BaseModel has a method `schema`
    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None


class ResponseFormat(Body):
    type: Annotated[
        Literal["text", "json_object", "json_schema"], Expected('"text" or "json_object" or "json_schema"')
    ] = REQUIRED
    json_schema: JsonSchema | None = None

    def schema_of_text(self) -> Object | None:
        """Return the JSON schema of the text; None: any text."""
        path = "response_format.json_schema"
        if self.type != "json_schema":
            if self.json_schema is not None:
                given = self.json_schema.model_dump(by_alias=True, exclude_unset=True)
                raise unexpected(path, given, EXPECTED["extra_forbidden"])
            return {"type": "object"} if self.type == "json_object" else None
        if self.json_schema is None:
            raise unexpected(path, None, "an object")
        if self.json_schema.definition is None:
            raise unexpected(f"{path}.schema", None, "an object")
        return self.json_schema.definition


class Prediction(Body):
    type: Annotated[Literal["content"], Expected('"content"')] = REQUIRED
    content: Content = REQUIRED


class Sampling(Body):
    """Fields that become `SamplingParams` of the same name, or of that in `PARAMETERS`."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    stop: Stop | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    priority: StrictInt | None = None
    timeout: Number | None = None
    speculation: Speculation | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Object | None = None
    regex: StrictStr | None = None
    ebnf: StrictStr | None = None


MAX_STOP_STRINGS = 64  # each is searched for after every token, in a thread that all requests share
PARAMETERS = {"min_tokens": "min_new_tokens", "ebnf": "grammar"}


class Generation(Sampling):
    """Fields of both `/v1/chat/completions` and `/v1/completions`."""

    n: StrictInt = 1
    max_tokens: StrictInt | None = None
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    # Ignored: they change nothing about the text.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Any = None
    service_tier: Any = None
    # Accepted with values that have no effect:
    detokenize: Annotated[Literal[True], Unsupported] | None = None
    length_penalty: Annotated[Literal[1], Unsupported] | None = None
    skip_special_tokens: Annotated[Literal[True], Unsupported] | None = None
    spaces_between_special_tokens: Annotated[Literal[True], Unsupported] | None = None
    modalities: Annotated[list[Literal["text"]], Len(1, 1), Unsupported] | None = None
    echo: Annotated[Literal[False], Unsupported] | None = None
    best_of: Annotated[Literal[1], Unsupported] | None = None
    suffix: Annotated[Literal[""], Unsupported] | None = None


class RequestBody(Body):
    model: StrictStr | None = None


class ConversationBody(RequestBody):
    """Fields that a chat template reads; alone, the body of `/tokenize` for messages."""

    messages: list[Message] = REQUIRED
    tools: list[Annotated[Function, Expected(FUNCTION)]] = []
    tool_choice: ToolChoice = "auto"
    chat_template_kwargs: Object = {}
    # Accepted with values that have no effect:
    add_generation_prompt: Annotated[Literal[True], Unsupported] | None = None
    documents: Annotated[list[Any], Len(0, 0), Unsupported] | None = None
    function_call: Annotated[Literal["none"], Unsupported] | None = None
    functions: Annotated[list[Any], Len(0, 0), Unsupported] | None = None


class PromptBody(RequestBody):
    """Fields of prompts; alone, the body of `/tokenize` for a prompt."""

    prompt: Prompt = REQUIRED
    add_special_tokens: StrictBool = True


class DetokenizeBody(RequestBody):
    tokens: Tokens = REQUIRED


class ChatBody(ConversationBody, Generation):
    """The body of `/v1/chat/completions`."""

    max_completion_tokens: StrictInt | None = None
    parallel_tool_calls: StrictBool = True
    logprobs: StrictBool = False
    top_logprobs: NumTop | None = None
    prediction: Prediction | None = None


class CompletionBody(PromptBody, Generation):
    """The body of `/v1/completions`."""

    logprobs: NumTop | None = None


AnyBody = TypeVar("AnyBody", bound=RequestBody)


def validate(kind: type[AnyBody], values: Object, settings: Settings) -> AnyBody:
    """Validate a body; RequestError for its first fault."""
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
        raise unexpected(where, first["input"], EXPECTED.get(first["type"], first["msg"])) from error
    if body.model is not None:
        check_model(body.model, settings)
    return body


def check_model(model: str, settings: Settings) -> None:
    """Refuse another model than the server's."""
    if model != settings.model_name:
        message = f"model is {shown(model)}, expected {shown(settings.model_name)}"
        raise RequestError(message, "model", status=404, code="model_not_found")


# --- requests to the engine


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request.

    Attributes:
        tokenize: tokenizes the prompts, which may take a while.
        params: of every prompt, `n` included.
        names: fields that parameters came from.
        stream: whether the response is a stream.
        options: of the stream.
        num_top: alternatives to each token; -1: no log-probabilities.
        tools: names of tools that may be called.
        must_call: the text is a call of one of them, as JSON.
        parallel_calls: the text may have several calls.
        num_prompts: lists of tokens that `tokenize` will return.
    """

    tokenize: Callable[[Engine], list[list[int]]]
    params: SamplingParams
    names: dict[str, str]
    stream: bool
    options: StreamOptions
    num_top: int = -1
    tools: Sequence[str] = ()
    must_call: bool = False
    parallel_calls: bool = True
    num_prompts: int = 1

    def refused(self, error: ValueError) -> RequestError:
        """Convert the engine's error about the parameters, with the names of the body's fields."""
        return with_field_names(error, self.names)


def read_chat(values: Object, settings: Settings, engine: Engine) -> ParsedRequest:
    """Read the body of `/v1/chat/completions`."""
    body = validate(ChatBody, values, settings)
    if body.top_logprobs and not body.logprobs:
        raise unexpected("top_logprobs", body.top_logprobs, "logprobs true with it")
    num_top = (body.top_logprobs or 0) if body.logprobs else -1
    conversation = read_conversation(body, settings)
    if body.stream_options.include_rounds and conversation.tools:
        raise unexpected("stream_options.include_rounds", True, "false with tools")
    params, names = read_sampling(body, settings, engine, num_top, conversation)
    return ParsedRequest(
        conversation.tokenize,
        params,
        names,
        body.stream,
        body.stream_options,
        num_top,
        conversation.tools,
        conversation.must_call,
        body.parallel_tool_calls,
    )


def read_completion(values: Object, settings: Settings, engine: Engine) -> ParsedRequest:
    """Read the body of `/v1/completions`."""
    body = validate(CompletionBody, values, settings)
    num_top = -1 if body.logprobs is None else body.logprobs
    params, names = read_sampling(body, settings, engine, num_top, None)
    prompts = read_prompts(body)
    return ParsedRequest(
        prompts.tokenize, params, names, body.stream, body.stream_options, num_top, num_prompts=len(prompts.prompts)
    )


def read_sampling(
    body: ChatBody | CompletionBody,
    settings: Settings,
    engine: Engine,
    num_top: int,
    conversation: Conversation | None,
) -> tuple[SamplingParams, dict[str, str]]:
    """Return the sampling parameters, and the fields that they came from."""
    if not 1 <= body.n <= settings.max_n:
        raise unexpected("n", body.n, f"1 to {settings.max_n}")
    given = {name: getattr(body, name) for name in Sampling.model_fields if name in body.model_fields_set}
    names = {PARAMETERS.get(name, name): name for name in given}
    values = settings.defaults | {parameter: given[name] for parameter, name in names.items()}
    values |= {"n": body.n, "logprobs": None if num_top < 0 else num_top}
    max_len = engine.config.max_len
    budget = max_len if isinstance(body, ChatBody) else 16
    for name in ("max_tokens", "max_completion_tokens"):  # the second counts if both are given
        if name in body.model_fields_set:
            budget, names["max_new_tokens"] = getattr(body, name), name
    values["max_new_tokens"] = min(budget, max_len)
    if values.get("top_k") == -1:  # other servers' value for all tokens
        values["top_k"] = 0
    if not values.get("ignore_eos"):
        values["stop_token_ids"] = [*end_tokens(engine), *values.get("stop_token_ids", ())]
    stop = values.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} entries, expected at most {MAX_STOP_STRINGS}", "stop")
    if "logit_bias" in values:
        values["logit_bias"] = read_bias(values["logit_bias"])
    schema = body.response_format.schema_of_text() if body.response_format else None
    if schema is not None:
        values["json_schema"], names["json_schema"] = schema, "response_format"
    if conversation is not None and conversation.must_call:
        if schema is not None:
            raise RequestError("response_format is given, expected none with a forced tool_choice", "response_format")
        values["json_schema"], names["json_schema"] = schema_of_calls(conversation.options["tools"]), "tool_choice"
    # A prediction is a hint, which an engine whose draft does not read it ignores.
    if isinstance(body, ChatBody) and body.prediction is not None and engine.draft.takes_predictions:
        values["prediction"] = "".join(part.text for part in body.prediction.content)
    try:
        params = SamplingParams(**values)
        engine.core.inputs.check_params(params)
    except ValueError as error:
        raise with_field_names(error, names) from error
    return params, names


def end_tokens(engine: Engine) -> list[int]:
    """Return the tokens that end a text: the engine's, and the end of turn that the tokenizer alone may name."""
    own = engine.tokenizer.eos_token_id
    return list(dict.fromkeys([*engine.eos_token_ids, *([] if own is None else [own])]))


def with_field_names(error: ValueError, names: dict[str, str]) -> RequestError:
    """Convert an error of `SamplingParams`, with the names of the body's fields for parameters."""
    message = str(error).removeprefix("SamplingParams: ")
    param = message.split(" ", 1)[0]
    for parameter, name in names.items():
        message = re.sub(rf"\b{parameter}\b", name, message)
    return RequestError(message, names.get(param, param))


def read_bias(bias: Object) -> dict[int, float]:
    for token, value in bias.items():
        is_token = token.isdecimal() and len(token) <= 10
        if not is_token or isinstance(value, bool) or not isinstance(value, int | float):
            expected = "token ids with a number each"
            raise RequestError(f"logit_bias has {shown(token)}: {shown(value)}, expected {expected}", "logit_bias")
    return {int(token): float(value) for token, value in bias.items()}


def schema_of_calls(tools: Sequence[Object]) -> Object:
    """Return the JSON schema of a call of one of the tools, whose parameters are definitions of it."""
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        key = f"{index}.{function['name']}"
        place = f"#/$defs/{escaped(key)}"
        definitions[key] = moved(function.get("parameters") or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


# --- prompts


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
