"""Engines of the tiny model with every kind of draft, for tests of requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Union
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

NEW_TOKENS = 24

DRAFTS: dict[str, Callable[[], Draft]] = {
    "none": Draft,
    "chain": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1),
    "union": lambda: Union(Eagle3(tiny_model("eagle3"), num_steps=3, topk=3, num_nodes=12), Ngram(num_nodes=12)),
}

LONG = SamplingParams(100_000, ignore_eos=True)


def make_engine(name: str = "chain", device: torch.device | str = "cpu", **options: Any) -> Engine:
    given = {"max_len": 160, "num_slots": 6, "dtype": torch.float32, "device": device, "page_size": 8} | options
    return Engine(tiny_model("target"), draft=DRAFTS[name](), **given)


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:length] for prompt, length in zip(held_out("code"), (40, 1, 25, 60, 33, 2, 50, 17), strict=False)]


def params() -> list[SamplingParams]:
    """Return greedy and sampled parameters, with and without log-probabilities and stop strings, short and long."""
    return [
        SamplingParams(NEW_TOKENS),
        SamplingParams(NEW_TOKENS, temperature=0.8, seed=3),
        SamplingParams(NEW_TOKENS, logprobs=2),
        SamplingParams(NEW_TOKENS, stop=["=", ")\n"], ignore_eos=True),
        SamplingParams(1),
        SamplingParams(NEW_TOKENS, temperature=1.0, top_k=20, seed=5, logprobs=True),
        SamplingParams(60, ignore_eos=True),
        SamplingParams(NEW_TOKENS, min_new_tokens=9),
    ]
