"""A tokenizer that gives the tokens of a synthetic text spellings, which together are JSON from some places on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_kernels.synthetic.models import SyntheticText

ITEM = 64  # tokens of a string in the JSON list


class SyntheticTokenizer:
    """Spellings of the tokens of a synthetic text: a JSON list of strings from any of `starts` on.

    Args:
        starts: places in the text, multiples of `ITEM`.
    """

    def __init__(self, text: SyntheticText, starts: Sequence[int]) -> None:
        self._begins = {text.tokens(start, 1)[0] for start in starts}
        self.spelling = {token: self._spell(token, place) for place, token in enumerate(text.order.tolist())}
        self._vocab = text.vocab

    def _spell(self, token: int, place: int) -> str:
        if token in self._begins:
            return f'["{place}'
        # A token that ends a string and starts the next is costly for grammars: it is checked for each mask. Real
        # vocabularies have a few hundred such tokens.
        return f'","{place}' if place % ITEM == 0 else f" {place}"

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
        """The end-of-text token, one that the text lacks."""
        return next(token for token in range(self._vocab) if token not in self.spelling)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.spelling[token] for token in tokens)


def json_starts(text: SyntheticText, count: int) -> list[int]:
    """Return `count` places, evenly spread, at which a JSON list may begin."""
    return [i * (len(text.order) // count) // ITEM * ITEM for i in range(count)]
