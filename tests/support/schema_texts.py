"""Random texts of a grammar, byte by byte, without a model."""

from __future__ import annotations

import functools
import json
import random
from contextlib import suppress
from typing import Any

import numpy as np

END = 256
LIKELY = [ord(c) for c in '"}],:0123456789abxyz.-ABCT@+']
SPACE = [9, 10, 13, 32]


@functools.cache
def compiler() -> Any:
    import xgrammar

    vocab = [bytes([byte]) for byte in range(END)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocab, vocab_type=xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


def compiled(schema: dict[str, Any]) -> Any:
    return compiler().compile_json_schema(json.dumps(schema), max_whitespace_cnt=16)


def accepts(grammar: Any, text: str) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(END)


def random_texts(grammar: Any, count: int, seed: int, most: int = 200) -> list[str]:
    """Return up to `count` texts of at most that many bytes: those that end in time and are UTF-8."""
    import xgrammar

    rng, texts = random.Random(seed), []
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    likely, space = np.isin(np.arange(END + 1), LIKELY), np.isin(np.arange(END + 1), SPACE)
    for _ in range(count):
        matcher, text = xgrammar.GrammarMatcher(grammar), bytearray()
        while len(text) < most:
            matcher.fill_next_token_bitmask(mask)
            allowed = np.unpackbits(mask.numpy()[0].view(np.uint8), bitorder="little")[: END + 1].astype(bool)
            if allowed[END] and (rng.random() < 0.3 or allowed.sum() == 1):
                with suppress(UnicodeDecodeError):  # a byte of a surrogate, which no tokenizer has
                    texts.append(text.decode())
                break
            allowed[END] = False
            for wanted, chance in ((~space, 1.0), (likely, 0.85)):
                if (allowed & wanted).any() and rng.random() < chance:
                    allowed &= wanted
            token = int(rng.choice(np.flatnonzero(allowed)))
            matcher.accept_token(token)
            text.append(token)
    return texts
