"""specdec_kernels' own engine."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from specdec_kernels import __version__
from specdec_kernels.engine import MTP, DFlash, Draft, DSpark, Eagle3, Engine, Ngram, SamplingParams

from ...sizes import ngram_groups, sized_draft
from . import Algorithm, Generated, Job, max_batch


def version() -> str:
    """Return the version of the package."""
    return __version__


def draft_of(job: Job, a: Algorithm) -> Draft | None:
    """Return the draft of an algorithm."""
    if not a.num_steps:
        return None
    if a.drafter == "ngram":
        return Ngram(num_nodes=a.num_nodes)
    kind: Any = {"eagle3": Eagle3, "mtp": MTP, "dspark": DSpark, "dflash": DFlash}[a.drafter]
    return sized_draft(a, kind, *([] if a.drafter == "mtp" else [job.head]))


class Runner:
    """Our engine with its models loaded."""

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        a = algorithm
        self._groups = ngram_groups(a)
        self.engine = Engine(
            job.target,
            draft=draft_of(job, a),
            adaptive=a.adaptive if a.num_steps else None,
            max_len=job.max_len,
            num_slots=max_batch(job),
            device=job.device,
            dtype=getattr(torch, job.dtype),
            **job.options,
        )

    def generate(self, prompts: list[list[int]], count: int) -> Generated:
        # Prompts of a union are written more than once: a request finds what its own prompt quotes.
        groups = islice(self._groups, len(prompts))
        params = [SamplingParams(max_new_tokens=count, ignore_eos=True, ngram_group=group) for group in groups]
        outputs = self.engine.generate(prompts, params)
        return Generated([output.tokens for output in outputs], sum(output.stats.rounds for output in outputs))
