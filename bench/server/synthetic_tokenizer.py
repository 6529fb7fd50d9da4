"""A tokenizer for a synthetic text: from some positions on, the decoded text is JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_kernels.synthetic.models import SyntheticText

ITEM = 64  # tokens of a string in the JSON list


class SyntheticTokenizer:
    """A tokenizer whose text from any of `starts` on, positions that are multiples of `ITEM`, is a JSON list."""

    def __init__(self, text: SyntheticText, starts: Sequence[int]) -> None:
        self._begins = {text.tokens(start, 1)[0] for start in starts}
        self.spelling = {token: self._spell(token, position) for position, token in enumerate(text.order.tolist())}
        self._vocab = text.vocab

    def _spell(self, token: int, position: int) -> str:
        if token in self._begins:
            return f'["{position}'
        # A token that ends a string and starts the next is costly for grammars: it is checked for each mask. Real
        # vocabularies have a few hundred such tokens.
        return f'","{position}' if position % ITEM == 0 else f" {position}"

    def fast(self) -> Any:
        """Return a fast tokenizer with these tokens; tokens outside the text are spelled by their id."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # of byte-level tokens
        words = {self.spelling.get(token, f"<{token}>").replace(" ", space): token for token in range(self._vocab)}
        backend = Tokenizer(models.WordLevel(words, unk_token=f"<{self.eos}>"))
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"<{self.eos}>")

    @property
    def eos(self) -> int:
        """The end-of-text token, which the text does not contain."""
        return next(token for token in range(self._vocab) if token not in self.spelling)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.spelling[token] for token in tokens)


def json_starts(text: SyntheticText, count: int) -> list[int]:
    """Return `count` positions, evenly spread, at which a JSON list may begin."""
    return [i * (len(text.order) // count) // ITEM * ITEM for i in range(count)]
