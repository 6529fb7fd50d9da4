"""The tokens of a planted text as text, which is JSON from some places on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_kernels.synthetic.models import PlantedText

ITEM = 64  # tokens of a string of the planted list


class Spelling:
    """What the tokens of a planted text are as text: JSON, from any of `starts` on.

    Args:
        starts: places in the text, multiples of `ITEM`.
    """

    def __init__(self, text: PlantedText, starts: Sequence[int]) -> None:
        self._begins = {text.tokens(start, 1)[0] for start in starts}
        self.of = {token: self._spelled(token, place) for place, token in enumerate(text.order.tolist())}
        self._vocab = text.vocab

    def _spelled(self, token: int, place: int) -> str:
        if token in self._begins:
            return f'["{place}'
        # A token that ends a string and goes on is looked at anew for each mask. Vocabularies have a few hundred.
        return f'","{place}' if place % ITEM == 0 else f" {place}"

    def tokenizer(self) -> Any:
        """A fast tokenizer of these tokens, all others being names of their own."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # as byte-level tokens have it
        words = {self.of.get(token, f"<{token}>").replace(" ", space): token for token in range(self._vocab)}
        backend = Tokenizer(models.WordLevel(words, unk_token=f"<{self.end}>"))
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"<{self.end}>")

    @property
    def end(self) -> int:
        """A token that the text lacks, which ends one."""
        return next(token for token in range(self._vocab) if token not in self.of)

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.of[token] for token in tokens)


def starts_of(text: PlantedText, most: int) -> list[int]:
    """Where texts that are JSON begin, of so many clients."""
    return [i * (len(text.order) // most) // ITEM * ITEM for i in range(most)]


def say_what_ends_texts(target: Path, spelling: Spelling) -> None:
    """Puts a tokenizer beside a checkpoint, and the token that ends a text into its configs."""
    spelling.tokenizer().save_pretrained(target)
    for name in ("config.json", "generation_config.json"):
        file = target / name
        told = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(told | {"eos_token_id": spelling.end}, indent=2) + "\n")
