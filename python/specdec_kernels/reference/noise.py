"""The counter-based noise of csrc/core/philox.h: Philox4x32-10 (Salmon et al., SC 2011)."""

from __future__ import annotations

from torch import Tensor

USE_DRAFT = 2  # NoiseUse::kDraft

LOW = 0xFFFFFFFF


def noise(seed: int, use: int, position: int, draw: int, blocks: Tensor) -> list[Tensor]:
    """The four 32-bit words of each block of `blocks`, an int64 tensor."""
    k0, k1 = seed & LOW, seed >> 32 & LOW
    c0, c1, c2, c3 = blocks * 0 + (position & LOW), blocks * 0 + draw, blocks, blocks * 0 + use
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits of a product are its bits, whatever the sign
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ k0, b & LOW, (a >> 32 & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return [c0, c1, c2, c3]
