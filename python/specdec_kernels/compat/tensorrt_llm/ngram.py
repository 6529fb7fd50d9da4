"""Chains from an n-gram index for TensorRT-LLM's requests. Does not import TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..followed_texts import FollowedTexts
from ..version_gate import QUIET, parts_to_take_over
from .contracts import NAME, NGRAM_DRAFTER, VERSIONS, parts_of

__all__ = ["NgramDrafts", "expect_known_engine"]


class NgramDrafts:
    """Drafts for the requests of TensorRT-LLM's batches, from the text of all requests, prompts included.

    Chains are drafted up to the length that the engine pads them to for its CUDA graphs, so a token that is not
    accepted costs nothing.

    Args:
        max_draft_len: tokens of a chain, 1 to 255.
        max_requests: most running requests.
        max_len: longest text, in tokens.
        max_tokens: capacity of the index.
    """

    def __init__(self, max_draft_len: int, max_requests: int, max_len: int, *, max_tokens: int = 1 << 20) -> None:
        if not 1 <= max_draft_len <= 255:
            raise ValueError(f"NgramDrafter: max_draft_len is {max_draft_len}, expected 1 to 255")
        self.max_draft_len = max_draft_len
        self._max_requests, self._max_len = max_requests, max_len
        self._texts = FollowedTexts(max_requests, max_len, max_tokens)
        self.index = self._texts.index

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Set the `py_draft_tokens` of each request that generates.

        A request gets no more drafts than it may still emit, and none if its text is longer than max_len.

        Args:
            scheduled_requests: its `generation_requests` have `request_id`, `get_tokens(0)`, `py_orig_prompt_len` and
                `py_max_new_tokens`.
            resource_manager: ignored.

        Raises:
            ValueError: there are more than max_requests.
        """
        requests = list(scheduled_requests.generation_requests)
        if len(requests) > self._max_requests:
            raise ValueError(
                f"NgramDrafter: {len(requests)} requests generate, expected at most max_requests, {self._max_requests}"
            )
        drafted, slots, lengths, room = [], [], [], []
        for request in requests:
            request.py_draft_tokens = []
            text = request.get_tokens(0)
            length = len(text)
            # The round emits one token more than it accepts drafts.
            limit = min(request.py_orig_prompt_len + request.py_max_new_tokens, self._max_len) - 1 - length
            if length > self._max_len or limit <= 0:
                continue
            slots.append(self._texts.follow(request.request_id, length, partial(tail_of, text)))
            drafted.append(request)
            lengths.append(length)
            room.append(min(limit, self.max_draft_len))
        if not drafted:
            return
        tree = self.index.draft(
            np.array(slots, np.int32), np.array(lengths, np.int32), self.max_draft_len + 1, mode="chain"
        ).tree
        counts = np.minimum(tree.num_nodes - 1, room).tolist()
        for request, tokens, count in zip(drafted, tree.tokens.tolist(), counts, strict=True):
            request.py_draft_tokens = tokens[1 : 1 + count]


def tail_of(text: Sequence[int], start: int) -> Sequence[int]:
    return text[start:]


def expect_known_engine() -> None:
    """Raise ValueError if the installed TensorRT-LLM calls drafters otherwise than ours expects."""
    reason = parts_to_take_over(NAME, VERSIONS, parts_of, QUIET).left.get(NGRAM_DRAFTER)
    if reason:
        raise ValueError(f"NgramDrafter: this version of {NAME} is not known, and {reason}")
