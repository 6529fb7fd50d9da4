"""SGLang with FA3 for trees, for which it takes FlashInfer by itself."""

from __future__ import annotations

from typing import Any

from . import sglang as plain

version = plain.version


class Runner(plain.Runner):
    options: dict[str, Any] = {"attention_backend": "fa3"}  # noqa: RUF012
