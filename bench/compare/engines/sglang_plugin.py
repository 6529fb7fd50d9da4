"""SGLang with our plugin: our attention for target and drafts, our tree functions and our n-gram drafts."""

from __future__ import annotations

from typing import Any

from . import sglang as plain

version = plain.version


class Runner(plain.Runner):
    """SGLang with our plugin."""

    plugin = True
    ngram = "SPECDEC_NGRAM"
    options: dict[str, Any] = {"attention_backend": "specdec"}  # noqa: RUF012
