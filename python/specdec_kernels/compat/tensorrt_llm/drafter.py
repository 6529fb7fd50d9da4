"""The drafter class with TensorRT-LLM's base class. Imports TensorRT-LLM."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from tensorrt_llm._torch.speculative.drafter import Drafter

from .ngram import NgramDrafts, expect_known_engine

__all__ = ["NgramDrafter"]


class NgramDrafter(NgramDrafts, Drafter):  # type: ignore[misc]
    """Drafts of the n-gram index, for `UserProvidedDecodingConfig(drafter=...)`.

    Args:
        max_draft_len: tokens of a chain, as in the configuration.
        max_requests: most running requests: the engine's `max_batch_size`.
        max_len: longest text, in tokens: the engine's `max_seq_len`.
        max_concurrency: most requests with which the engine speculates; None: any number.
        max_tokens: capacity of the index.

    Raises:
        ValueError: max_draft_len is not 1 to 255, or the installed TensorRT-LLM calls drafters otherwise.
    """

    def __init__(
        self,
        max_draft_len: int,
        *,
        max_requests: int,
        max_len: int,
        max_concurrency: int | None = None,
        max_tokens: int = 1 << 20,
    ) -> None:
        expect_known_engine()
        self._arguments: dict[str, Any] = {
            "max_draft_len": max_draft_len,
            "max_requests": max_requests,
            "max_len": max_len,
            "max_concurrency": max_concurrency,
            "max_tokens": max_tokens,
        }
        NgramDrafts.__init__(self, max_draft_len, max_requests, max_len, max_tokens=max_tokens)
        # The base class names the length of a chain differently from version to version.
        known = dict.fromkeys(("max_draft_len", "max_draft_tokens", "max_total_draft_tokens"), max_draft_len)
        base = inspect.signature(Drafter.__init__).parameters
        given = {name: value for name, value in known.items() if name in base}
        Drafter.__init__(self, max_concurrency=max_concurrency, **given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make another with an empty index: the engine's process gets the configuration as a pickle."""
        return partial(type(self), **self._arguments), ()
