"""Random texts of a grammar, byte by byte, without a model."""

from __future__ import annotations

import functools
import json
import random
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from specdec_kernels.engine.grammars import (
    LlguidanceMatcher,
    Matcher,
    NewMatcher,
    StopTokens,
    Vocabulary,
    XgrammarMatcher,
    checked_ebnf,
    grammar_of_pattern,
    grammar_of_schema,
)

END = 256
LIKELY = np.isin(np.arange(END + 1), [ord(c) for c in '"}],:0123456789abxyz.-ABCT@+'])
SPACE = np.isin(np.arange(END + 1), [9, 10, 13, 32])


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary([bytes([byte]) for byte in range(END)] + [b""], END)


def new_matcher(kind: str, source: Any) -> NewMatcher:
    """Return what makes matchers of a constraint, byte by byte; ValueError if it is refused."""
    stops = StopTokens([END], END + 1)
    if kind == "grammar":
        ebnf = vocabulary().compiled_ebnf(checked_ebnf(source))
        return NewMatcher(lambda: XgrammarMatcher(ebnf, stops), END + 1)
    grammar = grammar_of_pattern(source) if kind == "regex" else grammar_of_schema(json.dumps(source))
    fresh = vocabulary().compiled(grammar)
    return NewMatcher(lambda: LlguidanceMatcher(fresh, stops), END + 1)


def accepts(make: NewMatcher, text: str) -> bool:
    matcher = make()
    return all(map(matcher.accept, text.encode())) and matcher.accept(END)


def allowed(matcher: Matcher) -> np.ndarray:
    """Return which of the tokens may come next."""
    mask = torch.zeros(-(-(END + 1) // 32), dtype=torch.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: END + 1].astype(bool)


def random_texts(make: NewMatcher, count: int, seed: int, most: int = 200) -> list[str]:
    """Return up to `count` texts of at most that many bytes: those that end in time and are UTF-8."""
    rng, texts = random.Random(seed), []
    for _ in range(count):
        matcher, text = make(), bytearray()
        while len(text) < most:
            may_come = allowed(matcher)
            assert may_come.any(), text
            if may_come[END] and (rng.random() < 0.3 or may_come.sum() == 1):
                with suppress(UnicodeDecodeError):  # a byte of a surrogate, which no tokenizer has
                    texts.append(text.decode())
                break
            may_come[END] = False
            for wanted, chance in ((~SPACE, 1.0), (LIKELY, 0.85)):
                if (may_come & wanted).any() and rng.random() < chance:
                    may_come &= wanted
            token = int(rng.choice(np.flatnonzero(may_come)))
            assert matcher.accept(token)
            text.append(token)
    return texts
