"""A drafter for TensorRT-LLM's `UserProvidedDecodingConfig`, on our n-gram index."""

from __future__ import annotations

from typing import Any

__all__ = ["NgramDrafter"]


def __getattr__(name: str) -> Any:
    """Import the drafter, and with it TensorRT-LLM, when it is asked for."""
    if name == "NgramDrafter":
        from .drafter import NgramDrafter

        return NgramDrafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
