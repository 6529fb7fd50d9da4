"""Pieces of a request's text as they can be sent, the text and bytes of single tokens, and how a tokenizer is set."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.text.detokenizer import Detokenizer, TextDecoder


class Piece(NamedTuple):
    """Some text, and whether it was drafted and accepted, or is the target's own token of a round."""

    text: str
    accepted: bool


class TextStream:
    """Pieces of a request's text, as its tokens arrive.

    It holds back a character whose bytes are incomplete, and as many characters as a stop string could still remove.

    Args:
        decoder: of the request's text.
        stop_strings: the request's.
    """

    def __init__(self, decoder: TextDecoder, stop_strings: Sequence[str]) -> None:
        self._decoder = decoder
        self._num_held = max(map(len, stop_strings), default=1) - 1
        self._waiting: list[Piece] = []
        self._num_sent = 0

    def push(self, tokens: list[int], accepted: bool = False) -> None:
        if text := self._decoder.push(tokens):
            self._waiting.append(Piece(text, accepted))

    def take(self) -> list[Piece]:
        """Return the pieces that can be sent now."""
        if not self._num_held:
            taken, self._waiting = self._waiting, []
        else:
            taken, held, room = [], [], self._num_held
            for piece in reversed(self._waiting):
                at = max(0, len(piece.text) - room)
                room -= len(piece.text) - at
                if at < len(piece.text):
                    held.append(Piece(piece.text[at:], piece.accepted))
                if at:
                    taken.append(Piece(piece.text[:at], piece.accepted))
            self._waiting, taken = held[::-1], taken[::-1]
        self._num_sent += sum(len(piece.text) for piece in taken)
        return taken

    def finish(self, text: str) -> list[Piece]:
        """Return the rest of the request's final text."""
        left = text[self._num_sent :]
        pieces = []
        for piece in self._waiting:
            if not left.startswith(piece.text):
                break
            pieces.append(piece)
            left = left[len(piece.text) :]
        accepted = self._waiting[len(pieces)].accepted if len(pieces) < len(self._waiting) else False
        return [*pieces, Piece(left, accepted)] if left else pieces


class TokenEnds:
    """Where the tokens of a text end in it, in characters: a token within a character where that begins."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._ends: list[int] = []
        self._num_settled = 0

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Add tokens, and return where each of them begins."""
        begins = []
        for token in tokens:
            begins.append(self._ends[-1] if self._ends else 0)
            self._num_settled += len(self._decoder.push([token]))
            self._ends.append(self._num_settled + len(self._decoder.pending))
        return begins

    @property
    def last(self) -> int:
        """The end of the last token."""
        return self._ends[-1]

    def count(self, begin: int, end: int | None) -> int:
        """Count the tokens of the characters from `begin` to `end` (exclusive; None: to the last token)."""
        first = bisect_left(self._ends, begin) + 1 if begin else 0
        last = len(self._ends) if end is None else min(bisect_left(self._ends, end) + 1, len(self._ends))
        return max(last - first, 0)


class TokenText(NamedTuple):
    """A single token: its text, with replacement characters for incomplete characters, and its bytes."""

    text: str
    bytes: list[int]

    @property
    def key(self) -> str:
        r"""The text, or if it is a part of a character, its bytes as OpenAI writes them: `bytes:\xf0\x9f`."""
        if list(self.text.encode()) == self.bytes:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes)


def token_texts(detokenizer: Detokenizer) -> Callable[[int], TokenText]:
    """Return a function that gives the text and bytes of a token after others."""

    @functools.lru_cache(maxsize=1 << 16)
    def of(token: int) -> TokenText:
        content = detokenizer.token_bytes(token)
        return TokenText(content.decode(errors="replace"), list(content))

    return of


def configuration_of(tokenizer: Any, template: str | None) -> dict[str, Any]:
    """Return a tokenizer's configuration as JSON values, without places of files.

    Args:
        tokenizer: one of transformers.
        template: that replaces its chat template.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if value is None or isinstance(value, str | int | float):
            return value
        return str(value)  # a token that is an object has its text

    given = getattr(tokenizer, "init_kwargs", {})
    files = [name for name in given if name.endswith("_file") or name == "name_or_path"]
    paths = [name for name, value in given.items() if isinstance(value, str | Path) and Path(value).is_absolute()]
    configuration = {name: value for name, value in given.items() if name not in (*files, *paths, "tokenizer_object")}
    found: dict[str, Any] = plain(configuration) | {"tokenizer_class": type(tokenizer).__name__}
    template = template or getattr(tokenizer, "chat_template", None)
    return found | ({} if template is None else {"chat_template": template})
