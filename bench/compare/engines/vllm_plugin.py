"""vLLM with our plugin: attention of the target and of the drafts is ours, and so is the proposer of n-grams."""

from __future__ import annotations

from typing import Any

from . import vllm as plain

version = plain.version


class Runner(plain.Runner):
    plugin = True
    ngram: dict[str, Any] = {"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer"}  # noqa: RUF012
    options: dict[str, Any] = {"attention_backend": "CUSTOM"}  # noqa: RUF012
