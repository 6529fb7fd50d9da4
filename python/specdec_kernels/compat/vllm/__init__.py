"""The vLLM plugin, and an n-gram proposer for vLLM's `custom_class` method."""

from .ngram import NgramProposer

__all__ = ["NgramProposer"]
