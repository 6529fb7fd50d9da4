"""vLLM with our plugin: our attention for target and drafts, and our n-gram proposer."""

from __future__ import annotations

from typing import Any

from . import vllm as plain

version = plain.version


class Runner(plain.Runner):
    """vLLM with our plugin."""

    plugin = True
    ngram: dict[str, Any] = {"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer"}  # noqa: RUF012
    options: dict[str, Any] = {"attention_backend": "CUSTOM"}  # noqa: RUF012
