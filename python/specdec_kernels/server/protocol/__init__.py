"""Requests of the HTTP API: their bodies, and what these ask of the engine."""

from .bodies import ConversationBody, DetokenizeBody, PromptBody, check_model, validate
from .errors import Object, RequestError, parse_body, unexpected, without_folders
from .prompts import read_conversation, read_prompts
from .requests import ParsedRequest, read_chat, read_completion
from .settings import Settings

__all__ = [
    "ConversationBody",
    "DetokenizeBody",
    "Object",
    "ParsedRequest",
    "PromptBody",
    "RequestError",
    "Settings",
    "check_model",
    "parse_body",
    "read_chat",
    "read_completion",
    "read_conversation",
    "read_prompts",
    "unexpected",
    "validate",
    "without_folders",
]
