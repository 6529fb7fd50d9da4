"""What n-gram replay asks for drafts: our index, and other packages'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Drafter:
    """What is replayed against: one request after another."""

    def learn(self, document: Sequence[int]) -> None:
        """Text that is there from the start."""
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request; the one before has ended."""
        raise NotImplementedError

    def extend(self, tokens: Sequence[int]) -> None:
        """What the round has accepted, and the token behind that."""
        raise NotImplementedError

    def draft(self) -> Any:
        """The call that is timed."""
        raise NotImplementedError

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        """Tokens and parents of what `draft` returned; node 0 is the root."""
        raise NotImplementedError
