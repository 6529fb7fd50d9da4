"""Request bodies of the HTTP API: pydantic models of OpenAI's fields, and of those that vLLM and SGLang add."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
from .errors import Object, RequestError, field_name, shown, unexpected
from .inert import OF_CHAT, OF_TEXT, Inert, asks_for_nothing
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
Unsupported = Expected(EXPECTED["extra_forbidden"])
REQUIRED: Any = Field(None, validate_default=True)  # so that a missing field fails as null does


class Body(BaseModel, extra="forbid"):
    """A JSON object. A field that is null, or that asks for nothing by `inert`, counts as missing."""

    inert: ClassVar[Inert] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None and not asks_for_nothing(cls.inert, k, v)}


def as_object(value: Any) -> Any:
    """Parse a JSON schema that is given as a string."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return strict_json.loads(value)
    return value


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
RequestId = Annotated[StrictStr, Field(min_length=1, max_length=256), Expected("a string of 1 to 256 characters")]
JsonObject = Annotated[Object, BeforeValidator(as_object), Expected("a JSON schema")]
Choice = Annotated[list[StrictStr], Len(1), Expected("a list of strings")]
Prompt = Annotated[
    StrictStr | Annotated[list[Any], Len(1)], Expected("a string, a list of token ids, or a list of either")
]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
Effort = Annotated[StrictStr, Predicate(EFFORTS.__contains__), Expected(f"one of {', '.join(EFFORTS)}")]


def as_text(part: Any) -> Any:
    """Return a refusal, which an earlier answer may have, as a part of text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[Function]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | Function | AllowedChoice,
    Expected(f'"auto", "none", "required" or {FUNCTION}'),
]


class TextPart(Body, extra="ignore"):
    type: Literal["text"]
    text: StrictStr


Part = Annotated[TextPart, Expected('{"type": "text", "text": ...}'), BeforeValidator(as_text)]
Content = Annotated[list[Part], BeforeValidator(as_parts)]


class Message(Body, extra="allow"):
    """A message of any role; fields beyond these go to the chat template."""

    role: StrictStr = REQUIRED
    content: Content = []
    refusal: StrictStr | None = None
    audio: Annotated[None, Unsupported] = None
    function_call: Annotated[None, Unsupported] = None  # since long `tool_calls`
    tool_calls: list[Annotated[Object, BeforeValidator(read_call)]] | None = None

    def as_dict(self) -> Object:
        """Return the message for chat templates, its content as one text."""
        text = "\n".join(part.text for part in self.content) or self.refusal or ""
        values = {k: v for k, v in self if v is not None and k != "refusal"} | {"content": text}
        if "reasoning" in values:  # vLLM's name; templates read the other one
            values.setdefault("reasoning_content", values["reasoning"])
        return values


class StreamOptions(Body):
    inert = {"include_obfuscation": (False,)}

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
    generated_token_ids: Tokens | None = None
    priority: StrictInt | None = None
    timeout: Number | None = None
    speculation: Speculation | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Object | None = None


PARAMETERS = {"min_tokens": "min_new_tokens"}


class StructuredOutputs(Body):
    """A constraint on the text, as vLLM takes it."""

    inert = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    definition: JsonObject | None = Field(None, alias="json")  # BaseModel has a method `json`
    json_object: StrictBool = False
    regex: StrictStr | None = None
    choice: Choice | None = None
    grammar: StrictStr | None = None


class Generation(Sampling):
    """Fields of both `/v1/chat/completions` and `/v1/completions`."""

    n: StrictInt = 1
    max_tokens: StrictInt | None = None
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: NumTop | None = None
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False
    # Constraints on the text, at most one of them: OpenAI's, then SGLang's, then vLLM's.
    response_format: ResponseFormat | None = None
    regex: StrictStr | None = None
    ebnf: StrictStr | None = None
    json_schema: JsonObject | None = None
    guided_json: JsonObject | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Choice | None = None
    guided_grammar: StrictStr | None = None
    structured_outputs: StructuredOutputs | None = None
    # Ignored: they change nothing about the text.
    user: StrictStr | None = None
    metadata: Object | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: Object | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    session_id: StrictStr | None = None
    guided_decoding_backend: StrictStr | None = None
    # The end of the response's id, by vLLM's and SGLang's names.
    request_id: RequestId | None = None
    rid: RequestId | None = None


class RequestBody(Body):
    model: StrictStr | None = None


class Reasoning(Body):
    """The reasoning effort, as OpenRouter and SGLang take it. `exclude`: leave the reasoning out of the answer."""

    effort: Effort | None = None
    enabled: StrictBool | None = None
    exclude: StrictBool = False

    @model_validator(mode="after")
    def _agree(self) -> Reasoning:
        if self.enabled is not None and self.effort is not None and self.enabled == (self.effort == "none"):
            raise PydanticCustomError("reasoning", "an effort that agrees with enabled")
        return self

    def as_effort(self) -> str | None:
        """Return the effort; None: no other than the chat template's own."""
        return self.effort or {True: "medium", False: "none", None: None}[self.enabled]


class ConversationBody(RequestBody):
    """Fields that a chat template reads; alone, the body of `/tokenize` for messages."""

    inert = OF_CHAT

    messages: list[Message] = REQUIRED
    tools: list[Annotated[Function, Expected(FUNCTION)]] = []
    tool_choice: ToolChoice = "auto"
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Object = {}
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None


class PromptBody(RequestBody):
    """Fields of prompts; alone, the body of `/tokenize` for a prompt."""

    inert = OF_TEXT

    prompt: Prompt = REQUIRED
    add_special_tokens: StrictBool = True


class DetokenizeBody(RequestBody):
    tokens: Tokens = REQUIRED


class ChatBody(ConversationBody, Generation):
    """The body of `/v1/chat/completions`."""

    max_completion_tokens: StrictInt | None = None
    parallel_tool_calls: StrictBool = True
    include_reasoning: StrictBool = True
    separate_reasoning: StrictBool = True
    logprobs: StrictBool = False
    top_logprobs: NumTop | None = None
    prediction: Prediction | None = None


class CompletionBody(PromptBody, Generation):
    """The body of `/v1/completions`."""

    logprobs: NumTop | None = None
    best_of: StrictInt = 1
    echo: StrictBool = False


AnyBody = TypeVar("AnyBody", bound=RequestBody)


def validate(kind: type[AnyBody], values: Object, settings: Settings) -> AnyBody:
    """Validate a body; RequestError for its first fault."""
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{field_name(part)}" for part in first["loc"])[1:]
        raise unexpected(where, first["input"], EXPECTED.get(first["type"], first["msg"])) from error
    if body.model is not None:
        check_model(body.model, settings)
    return body


def check_model(model: str, settings: Settings) -> None:
    """Refuse another model than the server's."""
    if model not in (settings.model_name, *settings.other_names):
        names = " or ".join(map(shown, (settings.model_name, *settings.other_names)))
        message = f"model is {shown(model)}, expected {names}"
        raise RequestError(message, "model", status=404, code="model_not_found")
