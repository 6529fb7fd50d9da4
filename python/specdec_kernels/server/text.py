"""Incremental detokenization of a request's text, and the text and bytes of single tokens."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream


class Piece(NamedTuple):
    """Some text, and whether it was drafted and accepted, or is the target's own token of a round."""

    text: str
    accepted: bool


class TextStream:
    """An incremental detokenizer.

    It holds back a character whose bytes are incomplete, and as many characters as a stop string could still remove.

    Args:
        tokenizer: the backend of a fast tokenizer.
        stop_strings: the request's.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._num_held = max(map(len, stop_strings), default=1) - 1
        self._waiting: list[Piece] = []
        self._sent = ""

    def push(self, tokens: list[int], accepted: bool = False) -> None:
        if not tokens or self._stream is None:
            return
        try:
            text = self._stream.step(self._tokenizer, tokens)
        except Exception:  # the decoder failed: `finish` sends the rest of the text
            self._stream = None
            return
        if text:
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
        self._sent += "".join(piece.text for piece in taken)
        return taken

    def finish(self, text: str) -> list[Piece]:
        """Return the rest of the request's final text."""
        left = text[len(self._sent) :] if text.startswith(self._sent) else ""
        pieces = []
        for piece in self._waiting:
            if not left.startswith(piece.text):
                break
            pieces.append(piece)
            left = left[len(piece.text) :]
        accepted = self._waiting[len(pieces)].accepted if len(pieces) < len(self._waiting) else False
        return [*pieces, Piece(left, accepted)] if left else pieces


class TokenEnds:
    """Where the tokens of a text end in it, in characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._ends: list[int] = []
        self._num_characters = 0

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._num_characters += len(self._stream.step(self._tokenizer, token) or "")
            self._ends.append(self._num_characters)

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


def token_texts(tokenizer: Any) -> Callable[[int], TokenText]:
    """Return a function that gives a token's text and bytes; `tokenizer` is the backend of a fast one."""
    added = {token: content.content for token, content in tokenizer.get_added_tokens_decoder().items()}
    by_bytes = "ByteLevel" in str(tokenizer.decoder)
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}

    @functools.lru_cache(maxsize=1 << 16)
    def of(token: int) -> TokenText:
        piece = added.get(token)
        if piece is not None:
            return TokenText(piece, list(piece.encode()))
        piece = tokenizer.id_to_token(token) or ""
        if by_bytes and all(character in byte_of for character in piece):
            content = bytes(byte_of[character] for character in piece)
        elif one_byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            content = bytes.fromhex(one_byte[1])
        else:
            content = piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # SentencePiece's space
        return TokenText(content.decode(errors="replace"), list(content))

    return of


def byte_characters() -> list[str]:
    """Return byte-level BPE's character for each byte: itself if it is printable, otherwise one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
