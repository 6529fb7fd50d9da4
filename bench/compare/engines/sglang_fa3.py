"""SGLang with FA3 for trees, where its default is FlashInfer."""

from __future__ import annotations

from typing import Any

from . import sglang as plain

version = plain.version


class Runner(plain.Runner):
    """SGLang with FA3."""

    options: dict[str, Any] = {"attention_backend": "fa3"}  # noqa: RUF012
