"""Every case, one file per room of csrc/."""

from __future__ import annotations

from ..harness import Case
from . import draft, tree

CASES: dict[str, Case] = {case.op: case for room in (draft, tree) for case in room.CASES}
