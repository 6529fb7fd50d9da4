"""Request bodies of the HTTP API: pydantic models of OpenAI's fields, and of those that vLLM and SGLang add."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
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

from ...engine.params import MAX_LOGPROBS
from .. import strict_json
from .errors import Object, RequestError, shown, unexpected
from .settings import Settings


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
