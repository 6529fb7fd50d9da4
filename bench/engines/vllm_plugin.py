"""vLLM with our plugin: attention of the target and of the drafts is ours."""

from __future__ import annotations

from typing import Any

from . import vllm as plain

version = plain.version


class Runner(plain.Runner):
    plugin = True
    options: dict[str, Any] = {"attention_backend": "CUSTOM"}  # noqa: RUF012
