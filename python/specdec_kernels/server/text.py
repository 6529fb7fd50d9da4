"""A request's text as its tokens arrive, in pieces that stay what they are; and what a token is by itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream


class Piece(NamedTuple):
    """Some text, and whether it was drafted and accepted, rather than the target's own token of a round."""

    text: str
    accepted: bool


class TextStream:
    """Turns tokens into text. A character whose bytes are incomplete waits for the rest of them, and as many characters
    wait as a stop string may still take back.

    Args:
        tokenizer: the backend of a fast tokenizer.
        stop_strings: of the request.
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
        except Exception:  # the decoder cannot go on from here: the rest comes with the whole text
            self._stream = None
            return
        if text:
            self._waiting.append(Piece(text, accepted))

    def take(self) -> list[Piece]:
        """What can be sent by now."""
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
        """What is left to send of the whole text, which the request's end has decided."""
        left = text[len(self._sent) :] if text.startswith(self._sent) else ""
        pieces = []
        for piece in self._waiting:
            if not left.startswith(piece.text):
                break
            pieces.append(piece)
            left = left[len(piece.text) :]
        accepted = self._waiting[len(pieces)].accepted if len(pieces) < len(self._waiting) else False
        return [*pieces, Piece(left, accepted)] if left else pieces


class TokenText(NamedTuple):
    """A token by itself: its text, with replacement characters where it is a part of one, and its bytes."""

    text: str
    bytes: list[int]


def token_texts(tokenizer: Any) -> Callable[[int], TokenText]:
    """What says a token's text and bytes; `tokenizer` is the backend of a fast one."""
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
            content = piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # how SentencePiece writes a space
        return TokenText(content.decode(errors="replace"), list(content))

    return of


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
