"""OpenAI's Responses API: bodies become those of chats, and answers items."""

from .endpoints import ResponsesApi

__all__ = ["ResponsesApi"]
