"""All cases, a file per folder of csrc/."""

from __future__ import annotations

from ..harness import Case
from . import attention, draft, experts, kv, layers, mla, ngram, quantized, recurrent, round, tree, verify

MODULES = (draft, tree, layers, quantized, experts, attention, mla, verify, kv, recurrent, round, ngram)
CASES: dict[str, Case] = {case.op: case for module in MODULES for case in module.CASES}
