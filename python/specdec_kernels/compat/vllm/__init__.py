"""The plugin that registers in vLLM, and an n-gram proposer for its custom drafts."""

from .ngram import NgramProposer

__all__ = ["NgramProposer"]
