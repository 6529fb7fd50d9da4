"""SGLang with our plugin: attention, drafts' attention and the functions on trees are ours, and so are n-grams."""

from __future__ import annotations

from typing import Any

from . import sglang as plain

version = plain.version


class Runner(plain.Runner):
    plugin = True
    ngram = "SPECDEC_NGRAM"
    options: dict[str, Any] = {"attention_backend": "specdec"}  # noqa: RUF012
