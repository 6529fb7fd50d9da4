"""Log-probabilities of emitted tokens, from rounds with drafts, are those of a prefill of the same text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Union
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

NEW_TOKENS = 32


def largest_distance(draft: Draft | None, dtype: torch.dtype, device: torch.device, count: int) -> float:
    """Return the largest distance of a token's log-probabilities, of greedy and of seeded texts side by side."""
    rng = random.Random(1)
    texts = [*held_out("code"), *held_out("repeat")]
    prompts = [texts[0][:24] * (i % 3 == 0) + rng.choice(texts)[: rng.randrange(8, 100)] for i in range(count)]
    params = [
        SamplingParams(NEW_TOKENS, logprobs=True, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(count)
    ]
    options: dict[str, Any] = {"max_len": 256, "num_slots": 8, "dtype": dtype, "device": device}
    with Engine(tiny_model("target"), draft=draft, prefix_cache=True, adaptive=False, **options) as engine:
        outputs = engine.generate(prompts, params)
    if draft is not None:
        assert sum(output.stats.accepted for output in outputs) > count
    with Engine(tiny_model("target"), **options) as engine:
        whole = [[*output.prompt_tokens, *output.tokens] for output in outputs]
        scored = engine.generate(whole, SamplingParams(1, prompt_logprobs=True))
    largest = 0.0
    for output, scores in zip(outputs, scored, strict=True):
        assert output.logprobs is not None and scores.prompt_logprobs is not None
        theirs = scores.prompt_logprobs[len(output.prompt_tokens) :]
        for one, other in zip(output.logprobs, theirs, strict=True):
            assert other is not None
            largest = max(largest, abs(one.logprob - other.logprob))
    return largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emitted_tokens_have_the_scores_of_a_prefill(dtype: torch.dtype, device: torch.device) -> None:
    """In bfloat16 logits of this model have steps of 1/16; a row of another text would be off by much more."""
    draft = Union(Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16), Ngram(num_nodes=8))
    limit = 1e-4 if dtype == torch.float32 else 0.3
    assert largest_distance(draft, dtype, device, 24) < limit
