"""All cases, a file per room of csrc/."""

from __future__ import annotations

from ..harness import Case
from . import attention, draft, experts, kv, layers, ngram, quantized, round, tree, verify

ROOMS = (draft, tree, layers, quantized, experts, attention, verify, kv, round, ngram)
CASES: dict[str, Case] = {case.op: case for room in ROOMS for case in room.CASES}
