"""Options of a server, apart from its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Options of a server, apart from its engine.

    Attributes:
        model_name: name by which clients address the model.
        other_names: that clients may use as well; responses have `model_name`.
        api_key: key that they must send; None: none.
        defaults: sampling parameters of requests that do not give them, by the names of `SamplingParams`.
        chat_template: replaces the tokenizer's.
        tool_parser: name of the parser of tool calls; None: found from the template.
        reasoning_parser: name of the parser of reasoning, or "none"; None: found from the template.
        max_queued: requests that may wait for a slot; further ones get 429.
        max_body_bytes: limit of one request's body.
        max_prompt_tokens: limit of one request's prompt; None: the engine's limit.
        max_n: limit of one request's choices.
        max_grammar_seconds: limit of a grammar's compilation.
        max_stored_responses: responses of `/v1/responses` that are kept, the most recently used ones.
        max_stored_bytes: their size.
        upload_seconds: limit of the time that a body takes to arrive.
        shows_tokenizer: whether `/tokenizer_info` answers.
        allowed_origins: of web pages that may ask the server ("*": any), by CORS.
    """

    model_name: str
    other_names: Sequence[str] = ()
    api_key: str | None = None
    defaults: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_queued: int = 2048
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_n: int = 128
    max_grammar_seconds: float = 5.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 << 20
    upload_seconds: float = 60.0
    shows_tokenizer: bool = False
    allowed_origins: Sequence[str] = ()
