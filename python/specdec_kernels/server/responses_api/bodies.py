"""The body of `/v1/responses`, and that of `/v1/chat/completions` which asks for the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Predicate
from pydantic import Field, StrictBool, StrictInt, StrictStr

from ..protocol import Object, RequestError
from ..protocol.bodies import REQUIRED, Body, Effort, Expected, NumTop, RequestBody, Sampling
from ..protocol.inert import OF_TEXT, Inert

FUNCTION = '{"type": "function", "name": ...}'
INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Fields of a chat's body, by which its errors name what is wrong, and those of this one.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


class FunctionTool(Body):
    """A function that may be called, in the flat form of this API."""

    inert: ClassVar[Inert] = {"allowed_callers": (["direct"],), "defer_loading": (False,), "output_schema": ()}

    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None

    def as_chat(self) -> Object:
        """Return the tool in the form of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunction(Body):
    type: Literal["function"]
    name: StrictStr

    def as_chat(self) -> Object:
        """Return the function in the form of a chat."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]

    def as_chat(self) -> Object:
        """Return the tools in the form of a chat."""
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TextFormat(Body):
    type: Annotated[Literal["text", "json_object", "json_schema"], Expected('"text", "json_object" or "json_schema"')]
    name: StrictStr | None = None
    description: StrictStr | None = None
    definition: Object | None = Field(None, alias="schema")  # BaseModel has a method `schema`
    strict: StrictBool | None = None

    def as_chat(self) -> Object:
        """Return the format in the form of a chat."""
        schema = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": self.type, **({"json_schema": schema} if schema or self.type == "json_schema" else {})}


class TextOptions(Body):
    inert: ClassVar[Inert] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


Include = Annotated[StrictStr, Predicate(INCLUDES.__contains__), Expected(f"one of {', '.join(INCLUDES)}")]
Summary = Annotated[Literal["auto", "concise", "detailed"], Expected('"auto", "concise" or "detailed"')]


class ReasoningOptions(Body):
    """The reasoning effort. A summary may be asked for: the reasoning itself is returned."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponsesBody(Sampling, RequestBody):
    """The body of `/v1/responses`."""

    inert: ClassVar[Inert] = {
        **OF_TEXT,
        "background": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "truncation": ("disabled",),
    }

    input: Annotated[StrictStr | list[Any], Expected("a string or a list of items")] = REQUIRED
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    store: StrictBool = True
    stream: StrictBool = False
    max_output_tokens: StrictInt | None = None
    max_tool_calls: StrictInt | None = None  # limits built-in tools alone
    parallel_tool_calls: StrictBool = True
    tools: list[Annotated[FunctionTool, Expected(FUNCTION)]] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedFunction | AllowedTools,
        Expected(f'"auto", "none", "required", {FUNCTION} or allowed_tools'),
    ] = "auto"
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    top_logprobs: NumTop | None = None
    include: list[Include] = Field(default_factory=list)
    chat_template_kwargs: Object = Field(default_factory=dict)
    # Ignored: they change nothing about the text.
    metadata: Object | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    service_tier: StrictStr | None = None
    user: StrictStr | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with its log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include

    def as_chat(self, messages: Sequence[Object]) -> Object:
        """Return the body of the chat with these messages."""
        chat: Object = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        choice = self.tool_choice
        format = self.text.format
        return chat | {
            "messages": messages,
            "tools": [tool.as_chat() for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else choice.as_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "response_format": None if format is None else format.as_chat(),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream,
        }

    def echo(self) -> Object:
        """Return the fields that a response repeats."""
        format = self.text.format
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": self.service_tier or "default",
            "store": self.store,
            "text": {
                "format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True),
                "verbosity": "medium",
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"parameters": None, "strict": None} | tool.model_dump() for tool in self.tools],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }


def renamed(error: RequestError) -> RequestError:
    """Return the error of a chat's body with the names of a response's body."""
    message, param = str(error), error.param
    for chat, own in NAMES.items():
        pattern = rf"(?<![\w.]){re.escape(chat)}\b"
        message = re.sub(pattern, own, message)
        param = param and re.sub(f"^{pattern}", own, param)
    return RequestError(message, param, status=error.status, code=error.code, headers=error.headers)
