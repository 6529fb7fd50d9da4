"""From bodies to requests of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...engine import Engine, SamplingParams
from ...engine.text.json_schemas import escaped, moved
from .bodies import (
    PARAMETERS,
    ChatBody,
    CompletionBody,
    Generation,
    Sampling,
    StreamOptions,
    validate,
)
from .errors import Object, RequestError, shown, unexpected
from .prompts import Conversation, read_conversation, read_prompts
from .settings import Settings

ANY_OBJECT = {"type": "object"}
MOST_ECHOED = 1 << 20  # tokens of prompts in one response; each of n choices repeats its prompt
MOST_SCORES = 1 << 19  # log-probabilities of prompts in one response, which take the event loop 0.5 s to encode
MAX_STOP_STRINGS = 64  # each is searched for after every token, in a thread that all requests share


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
        tools: the tools that may be called: their parameters, by their names.
        must_call: the text is a call of one of them, as JSON.
        parallel_calls: the text may have several calls.
        separate_reasoning: reasoning is no part of the text.
        include_reasoning: return it.
        num_prompts: lists of tokens that `tokenize` will return.
        echo: the prompts as they were given, if the response shows them.
        num_prompt_top: alternatives to each token of the prompt, in vLLM's form; -1: none is asked for.
        generates: whether the response shows what follows the prompt.
        shows_ids: the response has the token ids of prompts and choices.
        ids_as_tokens: log-probabilities name tokens by their ids.
        id: the end of the response's id; None: a new one.
        continued: the text of the message that the answer continues; None: it is a message of its own.
    """

    tokenize: Callable[[Engine], list[list[int]]]
    params: SamplingParams
    names: dict[str, str]
    stream: bool
    options: StreamOptions
    num_top: int = -1
    tools: dict[str, Any] = field(default_factory=dict)
    must_call: bool = False
    parallel_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    num_prompts: int = 1
    echo: Sequence[str | list[int]] = ()
    num_prompt_top: int = -1
    generates: bool = True
    shows_ids: bool = False
    ids_as_tokens: bool = False
    id: str | None = None
    continued: str | None = None

    @property
    def shows_prompts(self) -> bool:
        """Return whether the response shows prompts or their log-probabilities."""
        return bool(self.echo) or self.num_prompt_top >= 0

    def check_prompts(self, token_lists: Sequence[Sequence[int]]) -> None:
        """Refuse more of prompts than one response may show."""
        num_tokens = sum(map(len, token_lists)) * self.params.n
        if self.echo and num_tokens > MOST_ECHOED:
            raise RequestError(f"echo asks for {num_tokens} tokens of prompts, expected at most {MOST_ECHOED}", "echo")
        if self.params.num_prompt_logprobs >= 0:
            count = num_tokens * (1 + self.params.num_prompt_logprobs)
            if count > MOST_SCORES:
                field = "prompt_logprobs" if self.num_prompt_top >= 0 else "logprobs"
                raise RequestError(f"{field} asks for {count} values of prompts, expected at most {MOST_SCORES}", field)

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
        body.separate_reasoning,
        body.include_reasoning and not (body.reasoning and body.reasoning.exclude),
        num_prompt_top=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        shows_ids=body.return_token_ids,
        ids_as_tokens=body.return_tokens_as_token_ids,
        id=body.request_id or body.rid,
        continued=conversation.continued,
    )


def read_completion(values: Object, settings: Settings, engine: Engine) -> ParsedRequest:
    """Read the body of `/v1/completions`."""
    body = validate(CompletionBody, values, settings)
    num_top = -1 if body.logprobs is None else body.logprobs
    params, names = read_sampling(body, settings, engine, num_top, None)
    prompts = read_prompts(body)
    return ParsedRequest(
        prompts.tokenize,
        params,
        names,
        body.stream,
        body.stream_options,
        num_top,
        num_prompts=len(prompts.prompts),
        echo=prompts.prompts if body.echo else (),
        num_prompt_top=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        generates=body.max_tokens != 0,
        shows_ids=body.return_token_ids,
        ids_as_tokens=body.return_tokens_as_token_ids,
        id=body.request_id or body.rid,
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
    if isinstance(body, CompletionBody) and body.best_of not in (1, body.n):
        raise unexpected("best_of", body.best_of, "none, 1 or n")
    given = {name: getattr(body, name) for name in Sampling.model_fields if name in body.model_fields_set}
    names = {PARAMETERS.get(name, name): name for name in given}
    values = settings.defaults | {parameter: given[name] for parameter, name in names.items()}
    values |= {"n": body.n, "logprobs": None if num_top < 0 else num_top}
    shows_prompt = isinstance(body, CompletionBody) and body.echo
    if shows_prompt and body.generated_token_ids:
        raise unexpected("echo", True, "false with generated_token_ids")
    if body.stream and body.prompt_logprobs is not None:
        raise unexpected("prompt_logprobs", body.prompt_logprobs, "none with stream")
    counts = [body.prompt_logprobs, num_top if shows_prompt and num_top >= 0 else None]
    values["prompt_logprobs"] = max((count for count in counts if count is not None), default=None)
    max_len = engine.config.max_len
    budget = max_len if isinstance(body, ChatBody) else 16
    for name in ("max_tokens", "max_completion_tokens"):  # the second counts if both are given
        if name in body.model_fields_set:
            budget, names["max_new_tokens"] = getattr(body, name), name
    if budget == 0 and isinstance(body, CompletionBody) and (body.echo or body.prompt_logprobs is not None):
        budget = 1  # the first token comes with the prompt's last row, and the response does not show it
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
    constraint = read_constraint(body)
    if conversation is not None and conversation.must_call:
        if constraint is not None:
            field = constraint.field
            raise RequestError(f"{field} is given, expected none with a forced tool_choice", field)
        constraint = Constraint("tool_choice", "json_schema", schema_of_calls(conversation.options["tools"]))
    if constraint is not None:
        values[constraint.parameter], names[constraint.parameter] = constraint.value, constraint.field
    # A prediction is a hint, which an engine whose draft does not read it ignores.
    if isinstance(body, ChatBody) and body.prediction is not None and engine.draft.takes_predictions:
        values["prediction"] = "".join(part.text for part in body.prediction.content)
    try:
        params = SamplingParams(**values)
        engine.core.inputs.check_params(params)
    except ValueError as error:
        raise with_field_names(error, names) from error
    return params, names


class Constraint(NamedTuple):
    """A constraint on the text: the field that gives it, and the parameter that it becomes."""

    field: str
    parameter: str
    value: Any


def read_constraint(body: Generation) -> Constraint | None:
    """Return the body's only constraint; RequestError for a second one."""
    schema = None if body.response_format is None else body.response_format.schema_of_text()
    given = [
        Constraint("response_format", "json_schema", schema),
        Constraint("regex", "regex", body.regex),
        Constraint("ebnf", "grammar", body.ebnf),
        Constraint("json_schema", "json_schema", body.json_schema),
        Constraint("guided_json", "json_schema", body.guided_json),
        Constraint("guided_regex", "regex", body.guided_regex),
        Constraint("guided_choice", "grammar", grammar_of_choice(body.guided_choice)),
        Constraint("guided_grammar", "grammar", body.guided_grammar),
    ]
    outputs = body.structured_outputs
    if outputs is not None:
        given += [
            Constraint("structured_outputs.json", "json_schema", outputs.definition),
            Constraint("structured_outputs.json_object", "json_schema", ANY_OBJECT if outputs.json_object else None),
            Constraint("structured_outputs.regex", "regex", outputs.regex),
            Constraint("structured_outputs.choice", "grammar", grammar_of_choice(outputs.choice)),
            Constraint("structured_outputs.grammar", "grammar", outputs.grammar),
        ]
    given = [constraint for constraint in given if constraint.value is not None]
    if len(given) > 1:
        raise RequestError(f"{given[1].field} is given, expected none with {given[0].field}", given[1].field)
    return given[0] if given else None


def grammar_of_choice(choice: Sequence[str] | None) -> str | None:
    """Return the grammar in EBNF of one text out of several."""
    return None if choice is None else "root ::= " + " | ".join(map(json.dumps, choice))


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


def schema_of_arguments(function: Object) -> Object:
    """Return the JSON schema of the arguments of a function, which are an object; RequestError if it takes none."""
    parameters: Object = function.get("parameters") or {}
    if "$ref" in parameters:  # to what says it
        return parameters
    given = parameters.get("type", "object")
    if given != "object" and not (isinstance(given, list) and "object" in given):
        expected = f'"object" ({shown(function["name"])} is called with an object)'
        raise RequestError(f"tools has parameters of the type {shown(given)}, expected {expected}", "tools")
    return parameters | {"type": "object"}


def schema_of_calls(tools: Sequence[Object]) -> Object:
    """Return the JSON schema of a call of one of the tools, whose parameters are definitions of it."""
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        key = f"{index}.{function['name']}"
        place = f"#/$defs/{escaped(key)}"
        definitions[key] = moved(schema_of_arguments(function), place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}
