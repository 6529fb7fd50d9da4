"""The interface of drafters that n-gram replay compares: our index, and those of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Drafter:
    """A drafter that serves one request after another."""

    def learn(self, document: Sequence[int]) -> None:
        """Index text before the first request."""
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        """Start the next request; the one before has ended."""
        raise NotImplementedError

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the tokens that a round has accepted, and the bonus token."""
        raise NotImplementedError

    def draft(self) -> Any:
        """Draft; this call is timed."""
        raise NotImplementedError

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        """Return tokens and parents of what `draft` returned; node 0 is the root."""
        raise NotImplementedError
