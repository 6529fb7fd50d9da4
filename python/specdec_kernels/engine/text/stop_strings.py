"""Stop strings: strings that end a request, searched for as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class StopStrings:
    """The stop strings of one request. `text` is the decoded text so far, up to a stop string found."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], min_new_tokens: int) -> None:
        self.text = ""
        self._strings, self._longest = strings, max(map(len, strings))
        self._tokenizer, self._stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        self._may_not_end = min_new_tokens  # number of next tokens that complete no stop string

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens complete a stop string; None if they complete none."""
        for count, token in enumerate(tokens, 1):
            # `step` returns None while the bytes of a character are incomplete.
            piece = self._stream.step(self._tokenizer, token) or ""
            begin = max(0, len(self.text) - self._longest + 1)
            self.text += piece
            self._may_not_end -= 1
            if self._may_not_end >= 0 or not piece:
                continue
            places = [place for string in self._strings if (place := self.text.find(string, begin)) >= 0]
            if places:
                self.text = self.text[: min(places)]
                return count
        return None
