"""specdec_kernels' own engine."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels import __version__
from specdec_kernels.engine import MTP, DFlash, Draft, DSpark, Eagle3, Engine, Ngram, SamplingParams

from . import Algorithm, Generated, Job, max_batch


def version() -> str:
    """Return the version of the package."""
    return __version__


def draft_of(job: Job, a: Algorithm) -> Draft | None:
    """Return the draft of an algorithm."""
    sizes: dict[str, int] = {"num_steps": a.num_steps, "topk": a.topk, "num_nodes": a.num_nodes}
    if not a.num_steps:
        return None
    if a.drafter == "ngram":
        return Ngram(num_nodes=a.num_nodes)
    if a.drafter == "mtp":
        return MTP(**sizes)
    kind: Any = {"eagle3": Eagle3, "dspark": DSpark, "dflash": DFlash}[a.drafter]
    draft: Draft = kind(job.head, **sizes)
    return draft


class Runner:
    """Our engine with its models loaded."""

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        a = algorithm
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
        outputs = self.engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
        return Generated([output.tokens for output in outputs], sum(output.stats.rounds for output in outputs))
