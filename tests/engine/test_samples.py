"""Several samples of one prompt, and predictions of what a text may repeat."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import AsyncEngine, Draft, Eagle3, Engine, NewTokens, Ngram, SamplingParams, Union
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out, tokenizer

HEAD = tiny_model("eagle3")


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:30] for prompt in held_out("code")[:3]]


def make_engine(draft: Draft | None = None, device: Any = "cpu", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_len": 160, "num_slots": 3, "dtype": torch.float32, "adaptive": False}
    return Engine(tiny_model("target"), draft=draft, device=device, **(defaults | options))


def test_sample_i_is_a_request_with_seed_plus_i(device: torch.device) -> None:
    engine = make_engine(Eagle3(HEAD, num_steps=3, topk=4, num_nodes=12), device)
    common: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    each = [
        SamplingParams(**common, n=3, seed=10),
        SamplingParams(**common, seed=4),
        SamplingParams(**common, n=2, seed=-1),
    ]
    outputs = engine.generate(prompts(), each)
    assert [(o.index, o.sample, o.seed) for o in outputs] == [
        (0, 0, 10), (0, 1, 11), (0, 2, 12), (1, 0, 4), (2, 0, -1), (2, 1, 0)
    ]  # fmt: skip
    singles = [SamplingParams(**common, seed=output.seed) for output in outputs]
    alone = engine.generate([output.prompt_tokens for output in outputs], singles)
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]
    assert outputs[0].tokens != outputs[1].tokens


def test_stop_strings_are_matched_per_sample() -> None:
    common: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "stop": ["=", "\n    "]}
    engine = make_engine()
    outputs = engine.generate(prompts(), SamplingParams(**common, n=4, seed=10))
    singles = [SamplingParams(**common, seed=output.seed) for output in outputs]
    alone = engine.generate([output.prompt_tokens for output in outputs], singles)
    assert [(o.tokens, o.text) for o in outputs] == [(o.tokens, o.text) for o in alone]
    assert sum(o.finish_reason == FinishReason.STOP for o in outputs) > 6


def test_seeds_that_are_drawn_follow_one_another() -> None:
    outputs = make_engine().generate(prompts()[:1], SamplingParams(4, temperature=1.0, n=4))
    seeds = [output.seed for output in outputs]
    assert seeds[0] is not None and seeds == [seeds[0] + i for i in range(4)]
    last = SamplingParams(temperature=1.0, n=2, seed=2**63 - 1)
    assert [last.of_sample(i).seed for i in range(2)] == [2**63 - 1, -(2**63)]
    greedy = make_engine().generate(prompts()[:1], SamplingParams(4, n=2))
    assert [(o.tokens, o.seed) for o in greedy] == [(greedy[0].tokens, None)] * 2


def test_stream_names_the_sample_of_a_piece() -> None:
    engine, texts = make_engine(), {}

    def on_tokens(new: NewTokens) -> None:
        texts.setdefault((new.index, new.sample), []).extend(new.tokens)

    params = SamplingParams(8, temperature=1.0, seed=1, n=2, ignore_eos=True)
    outputs = engine.generate(prompts()[:2], params, on_tokens=on_tokens)
    assert texts == {(o.index, o.sample): o.tokens for o in outputs} and len(texts) == 4
    requests = engine.submit_many(prompts()[:2], params)
    assert [request.result().tokens for request in requests] == [output.tokens for output in outputs]


def test_one_request_has_one_sample() -> None:
    engine = make_engine()
    message = "submit: params has n=2, expected 1 (submit_many returns the requests of all samples)"
    with pytest.raises(ValueError) as error:
        engine.submit([1], SamplingParams(n=2))
    assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        asyncio.run(AsyncEngine(engine).submit([1], SamplingParams(n=2)))
    assert str(error.value) == message
    for n in (0, 1025):
        with pytest.raises(ValueError) as error:
            SamplingParams(n=n)
        assert str(error.value) == f"SamplingParams: n is {n}, expected 1 to 1024"


# --- predictions


@pytest.mark.parametrize("union", [False, True], ids=["ngram", "union"])
def test_prediction_is_drafted_and_keeps_text(union: bool, device: torch.device) -> None:
    def engine() -> Engine:  # each has seen nothing yet
        ngram = Ngram(num_nodes=8)
        return make_engine(Union(Eagle3(HEAD, num_steps=2, topk=2), ngram, num_nodes=16) if union else ngram, device)

    plain = SamplingParams(40, ignore_eos=True)
    for prompt in prompts():
        (free,) = engine().generate([prompt], plain)
        text = free.tokens
        for prediction in (text, tokenizer().decode(text)):
            (output,) = engine().generate([prompt], SamplingParams(40, ignore_eos=True, prediction=prediction))
            assert output.tokens == text
            assert output.stats.rounds <= 40 / 4 and output.stats.rounds < free.stats.rounds
    wrong = SamplingParams(40, ignore_eos=True, prediction=held_out("repeat")[0][:60])
    assert engine().generate([prompt], wrong)[0].tokens == text


def test_predictions_of_requests_that_wait_and_are_retracted(device: torch.device) -> None:
    plain = SamplingParams(60, ignore_eos=True)
    want = [output.tokens for output in make_engine(None, device).generate(prompts() * 2, plain)]
    engine = make_engine(Ngram(num_nodes=8), device, page_size=4, num_pages=-(-(160 + 9) // 4))
    params = [SamplingParams(60, ignore_eos=True, prediction=text) for text in want]
    outputs = engine.generate(prompts() * 2, params)
    assert [output.tokens for output in outputs] == want
    assert engine.stats().retractions > 0


@pytest.mark.parametrize(
    ("draft", "prediction", "message"),
    [
        (None, [1], "SamplingParams: prediction is given, expected none without Ngram in Engine(draft=)"),
        (Ngram(), [1] * 160, "SamplingParams: prediction has 160 tokens, expected at most 159 (max_len - 1)"),
        (Ngram(), [-1], "SamplingParams: prediction has token -1, expected 0 to 2047 (the model's vocabulary)"),
        (Ngram(), 5, "SamplingParams: prediction is a int, expected text or a list of token ids"),
    ],
    ids=["draft", "long", "token", "type"],
)  # fmt: skip
def test_predictions_that_are_refused(draft: Draft | None, prediction: Any, message: str) -> None:
    with make_engine(draft) as engine, pytest.raises((ValueError, TypeError)) as error:
        engine.submit([1], SamplingParams(prediction=prediction))
    assert str(error.value) == message


def test_empty_prediction_is_ignored() -> None:
    assert make_engine(Ngram()).generate([[1, 2]], SamplingParams(2, prediction=[]))[0].tokens
