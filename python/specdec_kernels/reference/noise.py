"""Reference of the counter-based noise of csrc/core/philox.h: Philox4x32-10 (Salmon et al., SC 2011)."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

USE_DRAFT = 2  # NoiseUse::kDraft

LOW = 0xFFFFFFFF

Word = TypeVar("Word", int, Tensor)  # 32 bits, in a Python int or an int64 tensor


def philox(seed: int, counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Return four words from a 64-bit seed and a four-word counter."""
    k0, k1 = seed & LOW, seed >> 32 & LOW
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # in a tensor: the low 64 bits of the product, whatever the sign
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ k0, b & LOW, (a >> 32 & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return c0, c1, c2, c3


def noise(seed: int, use: int, position: int, draw: int, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of each block of `blocks`, an int64 tensor."""
    return philox(seed, (blocks * 0 + (position & LOW), blocks * 0 + draw, blocks, blocks * 0 + use))
