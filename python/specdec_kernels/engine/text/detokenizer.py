"""From tokens to text, in the context of the tokens before them.

Tokenizers treat the beginning of a text in ways of their own: those of SentencePiece drop its first space. So a
completion's text is what its tokens add to the text of its prompt, and both together are what the tokenizer decodes
from all tokens. Special tokens have no text, and `clean_up_tokenization_spaces` is not applied.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4  # tokens that a decoder begins with, unless they have no text
MOST_HELD = 64  # tokens that are held back by a tokenizer of unknown kind


def bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for, as in GPT-2 (printable: themselves)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = bytes_of_letters()


class Table(dict[int, bytes]):
    """Values of tokens, each made when it is first read."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        self._make = make

    def __missing__(self, token: int) -> bytes:
        self[token] = value = self._make(token)
        return value


class Detokenizer:
    """Decodes tokens of one tokenizer, which may be of any kind. Thread-safe.

    Attributes:
        is_fast: whether the tokenizer is one of `tokenizers`.
        is_byte_level: a token stands for bytes, whatever its context.
        has_bytes: some tokens are single bytes, and the others are text: a run of such bytes is text if all of it is
            UTF-8, otherwise a replacement character for each.
        may_end_open: it is not known which tokens end inside a character.
        bytes_of: the bytes of each token, of a byte-level tokenizer; otherwise those of tokens that are single bytes.

    Args:
        tokenizer: of transformers.
        shown: names of special tokens that are text.
    """

    def __init__(self, tokenizer: Any, shown: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.is_fast = bool(getattr(tokenizer, "is_fast", False))
        self._special = dict.fromkeys(map(int, getattr(tokenizer, "all_special_ids", None) or ()), "")  # their names
        kind = ""
        if self.is_fast:
            self._backend = tokenizer.backend_tokenizer
            kind = str(self._backend.decoder)
            added = self._backend.get_added_tokens_decoder()
            self._special = {token: content.content for token, content in added.items() if content.special}
        self._shown = {token: name for token, name in self._special.items() if name in shown}
        self._special = {token: name for token, name in self._special.items() if token not in self._shown}
        self.is_byte_level = kind.startswith("ByteLevel(")
        self.has_bytes = "ByteFallback" in kind
        self.may_end_open = not self.is_fast or (not self.is_byte_level and "ByteLevel(" in kind)
        self.bytes_of = Table(self._letters if self.is_byte_level else self._single_byte)
        self._texts = Table(self._bytes_in_context)
        self._anchor: tuple[list[int], int] | None = None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens that begin a text."""
        if not tokens:
            return ""
        if self._shown and skip_special_tokens:
            tokens, skip_special_tokens = self.visible(tokens), False
        source = self._backend if self.is_fast else self._tokenizer
        text: str = source.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Decode the tokens of a completion after those of its prompt."""
        decoder = self.decoder(prompt)
        return decoder.push(tokens) + decoder.rest()

    def decoder(self, prompt: Sequence[int]) -> TextDecoder:
        """Return the incremental decoder of a completion of a prompt."""
        return ByteDecoder(self, prompt) if self.is_byte_level else WindowDecoder(self, prompt)

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the text has some of the special tokens."""
        return bool(self._shown)

    def visible(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are not special."""
        return [token for token in tokens if token not in self._special]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; of a special token, its name."""
        return self._texts[token]

    def text_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; nothing for a special token."""
        return b"" if token in self._special else self._texts[token]

    def _letters(self, token: int) -> bytes:
        if token in self._shown:
            return self._shown[token].encode()
        piece = "" if token in self._special else self._backend.id_to_token(token) or ""
        if all(letter in LETTERS for letter in piece):
            return bytes(LETTERS[letter] for letter in piece)
        return piece.encode()  # an added token

    def _single_byte(self, token: int) -> bytes:
        piece = (self._backend.id_to_token(token) or "") if self.has_bytes else ""
        found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
        return bytes.fromhex(found[1]) if found else b""

    def _bytes_in_context(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        if self.is_byte_level or self.bytes_of[token]:
            return self.bytes_of[token]
        if self._anchor is None:
            self._anchor = self._find_anchor()
        context, length = self._anchor
        return self.decode([*context, token])[length:].encode()

    def _find_anchor(self) -> tuple[list[int], int]:
        """Return a token whose text is a letter or more, in a list, and the length of its text."""
        for token in range(1 << 16):
            if token not in self._special and not self.bytes_of[token]:
                text = self.decode([token])
                if text.isalpha():
                    return [token], len(text)
        return [], 0


class TextDecoder(ABC):
    """Decodes a completion as its tokens arrive. Text that `push` has returned never changes.

    Attributes:
        pending: complete characters that are held back since tokens to come may change them, as far as they are known.
    """

    pending = ""

    @abstractmethod
    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete by now."""

    @abstractmethod
    def rest(self) -> str:
        """Return the text that is held back, as it is if no token follows."""


class ByteDecoder(TextDecoder):
    """Decodes the tokens of a byte-level vocabulary. It holds back the bytes of an incomplete character."""

    def __init__(self, of: Detokenizer, prompt: Sequence[int]) -> None:
        self._of = of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        context = b""
        for token in reversed(prompt):
            if len(context) > 3:  # a character has up to 4 bytes
                break
            context = of.bytes_of[token] + context
        self._utf8.decode(context)
        self._shown = bool(self._utf8.getstate()[0])  # the prompt's text ends with an incomplete character

    def push(self, tokens: Sequence[int]) -> str:
        text = self._utf8.decode(b"".join(map(self._of.bytes_of.__getitem__, tokens)))
        if text and self._shown:
            text, self._shown = text.removeprefix(REPLACEMENT), False
        return text

    def rest(self) -> str:
        return REPLACEMENT if self._utf8.getstate()[0] and not self._shown else ""


class WindowDecoder(TextDecoder):
    """Decodes by any tokenizer: the last tokens with and without the new ones; what differs is new text.

    The window begins with tokens whose text is complete and not empty, so that a tokenizer finds the beginning of the
    text in them. It holds back a run of tokens that are single bytes up to its end: one byte that is no UTF-8 changes
    the text of all of them.
    """

    def __init__(self, of: Detokenizer, prompt: Sequence[int]) -> None:
        self._of = of
        size = CONTEXT
        while True:
            self._tokens = of.visible(prompt[-size:])
            self._read = self._closed(self._tokens)
            if size >= len(prompt):
                self._before = of.decode(self._tokens[: self._read])
                break
            if self._move(0):
                break
            size *= 4
        self._shown = of.decode(self._tokens)[len(self._before) :]  # text of the prompt that may still change
        self._run = ByteRun()
        self._run.push(of, self._tokens[self._read :])

    def push(self, tokens: Sequence[int]) -> str:
        new = self._of.visible(tokens)
        closed = self._closed(new)
        end = len(self._tokens) + closed
        self._tokens += new
        if closed:
            self._run = ByteRun()
        self._run.push(self._of, new[closed:])
        return self._take(end) if closed else ""

    @property
    def pending(self) -> str:  # type: ignore[override]
        return self._new(self._run.text)

    def rest(self) -> str:
        return self._new(self._added(len(self._tokens))) if len(self._tokens) > self._read else ""

    def _closed(self, tokens: list[int]) -> int:
        """Return how many of the tokens there are up to the last one that is not a single byte."""
        end = len(tokens)
        while end and self._of.bytes_of[tokens[end - 1]]:
            end -= 1
        return end

    def _move(self, begin: int) -> bool:
        """Let the window begin at `begin`, or after the single bytes there; return False if it had no text then."""
        while begin < self._read and self._of.bytes_of[self._tokens[begin]]:
            begin += 1
        text = self._of.decode(self._tokens[begin : self._read])
        if text:
            del self._tokens[:begin]
            self._read, self._before = self._read - begin, text
        return bool(text)

    def _added(self, end: int) -> str:
        """Return the text that tokens from `read` to `end` add to that before them."""
        text = self._of.decode(self._tokens[:end])
        return added(self._before, text)

    def _new(self, text: str) -> str:
        return added(self._shown, text)

    def _take(self, end: int) -> str:
        text = self._added(end)
        if self._of.may_end_open and text.endswith(REPLACEMENT) and end - self._read < MOST_HELD:
            return ""
        if not text and end > MOST_HELD:
            del self._tokens[self._read : end]  # no text after much without text: no context either
            return ""
        size, self._read = CONTEXT, end
        while size < end and not self._move(end - size):
            size *= 4
        if size >= end:
            self._before = self._of.decode(self._tokens[:end])
        text, self._shown = self._new(text), ""
        return text


def added(before: str, text: str) -> str:
    """Return what a text has after the characters that it shares with the one before."""
    if text.startswith(before):
        return text[len(before) :]
    pairs = zip(before, text, strict=False)
    return text[next((place for place, (old, new) in enumerate(pairs) if old != new), len(text)) :]


class ByteRun:
    """The complete characters of a run of tokens that are single bytes."""

    def __init__(self) -> None:
        self.text = ""
        self._num_bytes = 0
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")()  # None: the run is no UTF-8

    def push(self, of: Detokenizer, tokens: Sequence[int]) -> None:
        self._num_bytes += len(tokens)
        if tokens and self._utf8 is not None:
            try:
                self.text += self._utf8.decode(b"".join(map(of.bytes_of.__getitem__, tokens)))
            except UnicodeDecodeError:
                self._utf8 = None
        if self._utf8 is None:
            self.text = REPLACEMENT * self._num_bytes
