"""Texts of an engine's requests in an n-gram index, by the requests' ids."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from ..ngram import NgramIndex

__all__ = ["FollowedTexts"]


class FollowedTexts:
    """An n-gram index that follows the texts of requests as they grow.

    Each text is inserted once. A request keeps its slot while it waits (after a retraction or a preemption), until
    newer requests need it. The text of finished requests can be matched until newer text overwrites it.

    Args:
        max_requests: most running requests; there are slots for as many waiting ones.
        max_len: longest text, in tokens.
        max_tokens: capacity of the index.
    """

    def __init__(self, max_requests: int, max_len: int, max_tokens: int) -> None:
        self.index = NgramIndex(max_tokens, 2 * max_requests, max_len)
        self._known: dict[Hashable, tuple[int, int]] = {}  # slot and length by id, least recently followed first
        self._free = list(range(2 * max_requests))

    def clear(self) -> None:
        self.index.clear()
        self._free += [slot for slot, _ in self._known.values()]
        self._known = {}

    def follow(self, request: Hashable, length: int, tokens_from: Callable[[int], Sequence[int]]) -> int:
        """Insert what is new in a request's text, and return its slot.

        Args:
            request: its id.
            length: of its text. If the text is shorter than before, the id belongs to another request.
            tokens_from: returns the text from a position.
        """
        slot, known = self._known.pop(request, (-1, 0))
        if slot < 0:
            slot = self._free.pop() if self._free else self._known.pop(next(iter(self._known)))[0]
        if known == 0 or known > length:
            self.index.release(slot)
            known = 0
        if known < length:
            self.index.insert(np.array(tokens_from(known), np.int32), slot)
        self._known[request] = slot, length
        return slot
