"""Every case, one file per room of csrc/."""

from __future__ import annotations

from ..harness import Case
from . import attention, draft, kv, ngram, round, tree, verify

CASES: dict[str, Case] = {
    case.op: case for room in (draft, tree, attention, verify, kv, round, ngram) for case in room.CASES
}
