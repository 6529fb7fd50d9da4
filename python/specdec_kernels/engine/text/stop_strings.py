"""Stop strings: strings that end a request, searched for as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import TextDecoder


class StopStrings:
    """The stop strings of one request.

    Attributes:
        text: the text before the stop string, once `find` has found one.
    """

    def __init__(self, decoder: TextDecoder, strings: Sequence[str], min_new_tokens: int) -> None:
        self.text = ""
        self._decoder, self._strings, self._longest = decoder, strings, max(map(len, strings))
        self._may_not_end = min_new_tokens  # number of next tokens that complete no stop string
        self._pieces: list[str] = []  # text that no token changes any more
        self._end = ""  # its last characters: a stop string may begin within them
        self._searched = 0  # characters after the begin of `_end` that were complete before the next token

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens complete a stop string; None if they complete none."""
        for count, token in enumerate(tokens, 1):
            piece = self._decoder.push([token])
            text = self._end + piece + self._decoder.pending
            self._pieces.append(piece)
            self._may_not_end -= 1
            if self._may_not_end < 0 and self._first(text) is not None:
                # A single byte to come may change text that is pending; as it is now, it is this one.
                settled = "".join(self._pieces)
                whole = settled + self._decoder.rest()
                if (place := self._first(whole, len(settled) - len(self._end) - len(piece))) is not None:
                    self.text = whole[:place]
                    return count
            self._end += piece
            cut = max(len(self._end) - self._longest + 1, 0)
            self._end, self._searched = self._end[cut:], len(text) - cut
        return None

    def _first(self, text: str, offset: int = 0) -> int | None:
        """Return the first place of a stop string that ends after the searched part of a text."""
        begins = {string: max(self._searched + offset - len(string) + 1, 0) for string in self._strings}
        places = [place for string, begin in begins.items() if (place := text.find(string, begin)) >= 0]
        return min(places, default=None)
