"""Many requests through a pool that is too small for them: each ends as it would alone, and no page is lost.

SPECDEC_SOAK=20000 pytest -m soak runs 20000 requests in all, shared by the tests of this file.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import Draft, Eagle3, Engine, NewTokens, Ngram, RequestOutput, SamplingParams, Standalone
from specdec_kernels.tiny import tiny_model
from support.exhaustive import thinned
from support.leaks import cached_pages, expect_nothing_left, resident_bytes
from support.sampled_texts import KINDS, close_draws
from support.tiny_checkpoint import Comparison, held_out, reference_model

pytestmark = pytest.mark.soak
MAX_LEN = 160
NUM_TEXTS = 16  # kinds of requests that are decoded alone first
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(num_nodes=6),
    "chain": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1),
    "drawn": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1, sampled=True),
    "tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=5),
    "adaptive": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
}
CACHED = {"ngram", "tree", "standalone", "adaptive"}  # with a prefix cache
REQUESTS = int(os.environ.get("SPECDEC_SOAK", 60 * len(DRAFTS))) // len(DRAFTS)


def make_engine(device: torch.device, draft: Draft | None, **options: object) -> Engine:
    given = {"max_len": MAX_LEN, "dtype": torch.float32, "device": device, "prefill_chunk": 64} | options
    return Engine(tiny_model("target"), draft=draft, **given)  # type: ignore[arg-type]


def texts_alone(device: torch.device, rng: random.Random) -> list[tuple[RequestOutput, SamplingParams]]:
    """Decode texts without speculation up to max_len; return each with its parameters."""
    prompts = [prompt[: rng.choice([1, 2, rng.randint(1, MAX_LEN - 1)])] for prompt in held_out("code")[:NUM_TEXTS]]
    kinds = [rng.choice([{}, *KINDS]) for _ in prompts]
    params = [SamplingParams(10_000, ignore_eos=True, seed=i, **kind) for i, kind in enumerate(kinds)]
    return list(zip(make_engine(device, None).generate(prompts, params), params, strict=True))


def any_request(text: RequestOutput, sampling: SamplingParams, rng: random.Random) -> SamplingParams:
    stops = rng.sample(range(2000), 3)
    if rng.random() < 0.4:
        stops.append(rng.choice(text.tokens))
    return replace(sampling, max_new_tokens=rng.choice([1, 2, rng.randint(1, 40), 1000]), stop_token_ids=stops)


def cut(tokens: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """Cut a text that goes on to max_len where a request's parameters end it; return it and the reason."""
    assert sampling.stop_token_ids is not None
    for count, token in enumerate(tokens, 1):
        if token in sampling.stop_token_ids:
            return tokens[:count], FinishReason.STOP
        if count == sampling.max_new_tokens:
            return tokens[:count], FinishReason.LENGTH
    return tokens, FinishReason.CONTEXT


def check(
    output: RequestOutput, alone: RequestOutput, sampling: SamplingParams, comparison: Comparison, drawn: bool
) -> bool:
    """Check a request's text. Return False if it differs at a draw or margin that is too close to call."""
    if drawn and sampling.temperature > 0:  # a text of its own
        want, reason = cut(output.tokens, sampling)
        ends = len(output.tokens) == MAX_LEN - len(output.prompt_tokens) or reason != FinishReason.CONTEXT
        assert output.tokens == want
        assert output.finish_reason == FinishReason.CANCELLED or (ends and output.finish_reason == reason)
        return True
    want, reason = cut(alone.tokens, sampling)
    if output.finish_reason == FinishReason.CANCELLED and output.tokens == want[: len(output.tokens)]:
        return True
    if (output.tokens, output.finish_reason) == (want, reason):
        return True
    at = next(i for i, (a, b) in enumerate(zip(output.tokens, want, strict=False)) if a != b)
    if sampling.temperature == 0:
        comparison.check(output.prompt_tokens, output.tokens, want)
    else:
        draws = close_draws(output.prompt_tokens, output.tokens[:at], sampling)
        assert {output.tokens[at], want[at]} <= draws, f"token {at} is {output.tokens[at]}, expected one of {draws}"
    return False


@pytest.mark.parametrize("name", thinned(DRAFTS, {"drawn", "adaptive"}.__contains__))
def test_engine_soak_keeps_texts_and_pages(name: str, device: torch.device) -> None:
    rng = random.Random(name)
    alone = texts_alone(device, rng)
    num_slots, num_pages = (12, 60) if REQUESTS < 500 else (48, 220)
    engine = make_engine(
        device,
        DRAFTS[name](),
        num_slots=num_slots,
        page_size=8,
        num_pages=num_pages,
        rounds_in_flight=2 if name != "ngram" else 1,
        adaptive=name == "adaptive",
        prefix_cache=name in CACHED,
    )
    chosen = [rng.choice(alone) for _ in range(REQUESTS)]
    params = [any_request(text, sampling, rng) for text, sampling in chosen]
    first = engine.submit([1], SamplingParams(1)).id  # ids go on from here
    finished, memory = 0, []

    def on_tokens(new: NewTokens) -> None:
        nonlocal finished
        if rng.random() < 0.03:
            engine.core.scheduler.cancel(first + 1 + rng.randrange(REQUESTS))
        if new.finish_reason != FinishReason.RUNNING:
            finished += 1
            if finished in (REQUESTS // 2, REQUESTS):
                memory.append((resident_bytes(), torch.cuda.memory_allocated() if device.type == "cuda" else 0))

    outputs = engine.generate([text.prompt_tokens for text, _ in chosen], params, on_tokens=on_tokens)
    comparison = Comparison(reference_model())
    others = sum(
        not check(output, text, sampling, comparison, engine.draft.sampled)
        for output, (text, _), sampling in zip(outputs, chosen, params, strict=True)
    )
    reasons = [output.finish_reason for output in outputs]
    stats = engine.stats()
    print(f"{name}: {stats}, {others} near-ties, {reasons.count(FinishReason.CANCELLED)} cancelled")
    assert others <= 2 + REQUESTS // 20
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.CANCELLED}
    assert reasons.count(FinishReason.CANCELLED) < REQUESTS / 2
    assert stats.retractions > 0 or name == "adaptive"  # rows of few nodes may find pages enough
    assert (stats.prefix_hits > 0) == (name in CACHED)

    engine.clear_cache()
    expect_nothing_left(engine)
    assert not cached_pages(engine)
    (half, half_cuda), (end, end_cuda) = memory
    assert end_cuda - half_cuda < 2**20  # states of the last prefill, which may be a longer one
    assert end - half < 64 * 2**20
