"""The prefix cache of engines over targets with recurrent layers: texts are those of engines without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Draft, Engine, Ngram, RequestOutput, SamplingParams
from support.exhaustive import exhaustive
from support.hybrid_cases import VOCAB, hybrid_module
from support.leaks import expect_nothing_lost
from support.observed_rounds import prefills_of
from support.tiny_checkpoint import Comparison

COUNT = 12
OPTIONS: dict[str, Any] = {
    "implementation": "native", "adaptive": False, "max_len": 128, "num_slots": 3, "page_size": 4,
    "dtype": torch.float32, "prefill_chunk": 24, "prefix_cache": True,
}  # fmt: skip
GREEDY = SamplingParams(COUNT, ignore_eos=True)


def make_engine(case: str, draft: Draft | None, device: torch.device | str, **changes: Any) -> Engine:
    return Engine(hybrid_module(case), draft=draft, device=device, **(OPTIONS | changes))


def random_text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts_alike() -> list[list[int]]:
    """Return prompts that are equal, longer, shorter, or diverge within a page and at its end."""
    text, other = random_text(50), random_text(20, seed=2)
    return [text, text, text + other, text[:30], text[:42] + other, text[:48] + other, text[:33], text[:1], text[:30]]


def params_alike(number: int, count: int) -> list[SamplingParams]:
    return [SamplingParams(count, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(number)]


def converse(engine: Engine, count: int = COUNT) -> list[RequestOutput]:
    """Prompts one by one, then together, then with their answers as the turns before."""
    prompts = prompts_alike()
    params, outputs = params_alike(len(prompts), count), []
    for prompt, each in zip(prompts, params, strict=True):
        outputs += engine.generate([prompt], each)
    outputs += engine.generate(prompts, params)
    turns = [[*output.prompt_tokens, *output.tokens, 5, 6, 7] for output in outputs[:4]]
    return outputs + engine.generate(turns, params[:4])


def expect_texts_of(case: str, outputs: list[RequestOutput], device: torch.device, count: int = COUNT) -> None:
    """Expect the texts of plain decoding without a cache, up to one near-tie."""
    params = [params for number in (9, 9, 4) for params in params_alike(number, count)]
    with make_engine(case, None, device, prefix_cache=False) as engine:
        want = engine.generate([output.prompt_tokens for output in outputs], params)
    expect_same(case, outputs, want, params)


def expect_same(
    case: str, ours: list[RequestOutput], theirs: list[RequestOutput], params: list[SamplingParams]
) -> None:
    comparison = Comparison(hybrid_module(case))
    for output, other, each in zip(ours, theirs, params, strict=True):
        comparison.check(output.prompt_tokens, list(output.tokens), list(other.tokens), each)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize(("page_size", "num_nodes"), [(1, 9), (16, 1), *exhaustive((1, 1), (16, 9))])
@pytest.mark.parametrize("case", ["qwen3_next", *exhaustive("falcon_h1", "nemotron_h", "lfm2", "zamba2")])
def test_prefix_cache_keeps_texts(case: str, page_size: int, num_nodes: int, device: torch.device) -> None:
    draft = Ngram(num_nodes=num_nodes) if num_nodes > 1 else None
    with make_engine(case, draft, device, page_size=page_size) as engine:
        outputs = converse(engine)
        stats = engine.stats()
        assert stats.prefix_hits == stats.snapshots_restored > 8 and stats.cached_tokens > 300
        assert outputs[1].cached_tokens == 49 // page_size * page_size
        expect_nothing_lost(engine)
        assert engine.core.scheduler.num_snapshots == 0
    expect_texts_of(case, outputs, device)


@pytest.mark.parametrize("case", ["falcon_h1", *exhaustive("qwen3_next", "lfm2")])
def test_few_snapshots_and_pages_keep_texts(case: str, device: torch.device) -> None:
    """Snapshots and pages are evicted, and requests retracted, all the time."""
    count, options = 30, {"num_snapshots": 2, "num_pages": 38, "rounds_in_flight": 2, "snapshot_rows": 16}
    with make_engine(case, Ngram(num_nodes=6), device, **options) as engine:
        outputs = converse(engine, count)
        stats = engine.stats()
        assert stats.snapshots_restored > 3 and stats.snapshots_evicted > 3 and stats.retractions > 0
        expect_nothing_lost(engine)
        assert engine.core.scheduler.num_snapshots == 0
    expect_texts_of(case, outputs, device, count)


def test_third_prompt_begins_where_two_diverge(device: torch.device) -> None:
    """The second one leaves the cached pages of the first at row 40, within no snapshot; it saves one there."""
    common = random_text(42)
    prompts = [common + random_text(30, seed) for seed in (2, 3, 4)]
    with make_engine("qwen3_next", None, device, num_snapshots=8) as engine:
        cached = [engine.generate([prompt], GREEDY)[0].cached_tokens for prompt in prompts]
        assert cached == [0, 0, 40]
        assert engine.stats().snapshots_saved == 4 and not engine.stats().snapshots_evicted


def test_long_prompt_has_snapshots_at_regular_rows(device: torch.device) -> None:
    text = random_text(90)
    with make_engine("qwen3_next", None, device, snapshot_rows=32, num_snapshots=8) as engine:
        passes = prefills_of(engine)
        engine.generate([text], GREEDY)
        assert [chunk.start for chunks in passes for chunk in chunks] == [0, 24, 32, 56, 64, 88]
        cached = [engine.generate([text[:end]], GREEDY)[0].cached_tokens for end in (80, 60, 33, 32)]
        assert cached == [64, 32, 32, 0]


def test_samples_of_a_prompt_prefill_it_once(device: torch.device) -> None:
    prompt, drawn = random_text(50), replace(GREEDY, temperature=0.9, seed=4, n=3)
    with make_engine("qwen3_next", Ngram(num_nodes=6), device) as engine:
        outputs = engine.generate([prompt], drawn)
    assert [output.cached_tokens for output in outputs] == [0, 48, 48]
    with make_engine("qwen3_next", None, device, prefix_cache=False) as engine:
        want = engine.generate([prompt], drawn)
    expect_same("qwen3_next", outputs, want, [replace(drawn, n=1, seed=output.seed) for output in want])


def test_new_weights_and_sleep_empty_the_cache(device: torch.device) -> None:
    prompt, other = random_text(50), hybrid_module("falcon_h1", seed=8)
    with make_engine("falcon_h1", None, device) as engine, Engine(other, device=device, **OPTIONS) as fresh:
        engine.generate([prompt], GREEDY)
        assert engine.generate([prompt], GREEDY)[0].cached_tokens == 48
        states = engine.target.states
        assert states is not None and engine.config.state_bytes == states.num_bytes and states.num_snapshots == 3
        engine.update_weights(dict(other.state_dict()))
        want = fresh.generate([prompt], GREEDY)[0]
        for cached in (0, 48):
            output = engine.generate([prompt], GREEDY)[0]
            assert (output.cached_tokens, output.tokens) == (cached, want.tokens)
        engine.sleep()
        assert engine.target.states is not None and engine.target.states.num_bytes == 0
        engine.wake()
        for cached in (0, 48):
            output = engine.generate([prompt], GREEDY)[0]
            assert (output.cached_tokens, output.tokens) == (cached, want.tokens)


def test_prefix_cache_default_of_hybrids() -> None:
    for options, num_snapshots in (({}, 3), ({"num_snapshots": 5}, 5), ({"num_snapshots": 0}, 0)):
        with make_engine("lfm2", None, "cpu", **{"prefix_cache": None, **options}) as engine:
            assert engine.config.prefix_cache == (num_snapshots > 0) and engine.config.num_snapshots == num_snapshots
