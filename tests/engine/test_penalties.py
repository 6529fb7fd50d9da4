"""Biases and penalties of requests: the text is what the target says with them, whatever drafts, and whatever else runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.engine.device.round import Round
from specdec_kernels.models.backends.module_copy import cache_name
from specdec_kernels.reference import verify as reference
from support.exhaustive import exhaustive, representative
from support.packaged_drafts import DRAFTS, TARGET
from support.tiny_checkpoint import held_out, reference_model

MAX_LEN, NEW_TOKENS = 128, 24
every_draft = pytest.mark.parametrize("name", representative(DRAFTS))
# What requests ask for; the third asks for nothing.
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "temperature": 0.8},
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": -0.3, "frequency_penalty": 0.4, "temperature": 1.0, "top_p": 0.9},
    {"logit_bias": {5: 4.0, 40: float("-inf"), 13: -2.5}, "frequency_penalty": -0.05, "temperature": 1.1, "top_k": 30},
]


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:40] for prompt in held_out("code")[: 2 * len(KINDS)]]


def params(**more: Any) -> list[SamplingParams]:
    common = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | more
    return [SamplingParams(**common, seed=70 + i, **KINDS[i % len(KINDS)]) for i in range(len(prompts()))]


def make_engine(name: str, device: torch.device | str = "cpu", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 4, "page_size": 4, "dtype": torch.float32}
    return Engine(TARGET, draft=DRAFTS[name](), adaptive=False, device=device, **(defaults | options))


def logits_with(x: torch.Tensor, prompt: list[int], generated: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Return the logits [V] with all of a request's penalties and biases, token by token."""
    x = x.double()
    for token, bias in (sampling.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(generated):
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(token)
    return x


def by_hand(prompt: list[int], sampling: SamplingParams) -> list[int]:
    generated: list[int] = []
    rows, cache = prompt, DynamicCache()
    while len(generated) < sampling.max_new_tokens:
        with torch.inference_mode():
            x = reference_model()(torch.tensor([rows]), **{cache_name(reference_model()): cache}).logits[0, -1]
        x = logits_with(x.clone(), prompt, generated, sampling)
        if sampling.temperature == 0:
            generated.append(int(x.argmax()))
            rows = generated[-1:]
            continue
        p = reference.filtered(x, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        generated.append(reference.drawn(p, reference.uniform(sampling.seed, len(prompt) + len(generated))))
        rows = generated[-1:]
    return generated


@functools.cache
def wanted() -> list[list[int]]:
    return [by_hand(prompt, one) for prompt, one in zip(prompts(), params(), strict=True)]


@every_draft
def test_text_is_the_targets_with_penalties(name: str, device: torch.device) -> None:
    outputs = make_engine(name, device).generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()


def test_penalties_beyond_64_bits_are_floats() -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 10**30, "presence_penalty": 2**63, "frequency_penalty": -(2**63)}
    large = SamplingParams(3, temperature=10**30, **penalties)
    edit = large.edits(1)
    assert edit is not None and (edit.presence, edit.repetition) == (float(2**63), 1e30)
    assert len(make_engine("none").generate(prompts()[:1], large)[0].tokens) == 3


def test_penalties_change_texts() -> None:
    without = make_engine("none").generate(prompts(), [SamplingParams(NEW_TOKENS, ignore_eos=True)] * len(prompts()))
    for i, (free, text) in enumerate(zip(without, wanted(), strict=True)):
        assert (free.tokens == text) == (not KINDS[i % len(KINDS)]), i


@pytest.mark.parametrize("name", ["eagle3-tree", *exhaustive("ngram")])
def test_penalties_by_budget_levels(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(Round, "_goes_by_depth", lambda *_: True)
    outputs = make_engine(name, device).generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()


@pytest.mark.parametrize("name", [*exhaustive("none"), "eagle3-tree", "standalone"])
def test_penalty_counts_survive_retraction(name: str, device: torch.device) -> None:
    engine = make_engine(name, device, num_pages=-(-(MAX_LEN + 80) // 4))
    outputs = engine.generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()
    if name == "none":
        assert engine.stats().retractions > 0


def test_repetition_penalty_is_that_of_transformers(device: torch.device) -> None:
    """Greedy, and read from the generation config."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, repetition_penalty=1.25, do_sample=False)
    sampling = SamplingParams.from_generation_config(config)
    assert sampling.repetition_penalty == 1.25
    outputs = make_engine("eagle3-tree", device).generate(prompts()[:6], sampling)
    for output in outputs:
        prompt = torch.tensor([output.prompt_tokens])
        with torch.inference_mode():
            want = reference_model().generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config, eos_token_id=None
            )
        assert output.tokens == want[0, prompt.shape[1] :].tolist()[: len(output.tokens)]


def test_penalty_counts_reset_with_slot(device: torch.device) -> None:
    """Neither from one that ended nor from one that was cancelled."""
    engine = make_engine("eagle3-tree", device, num_slots=1)
    plain = engine.generate(prompts()[:1], SamplingParams(NEW_TOKENS, ignore_eos=True))[0].tokens
    strong = SamplingParams(80, ignore_eos=True, presence_penalty=2.0, logit_bias={plain[0]: float("-inf")})
    assert plain[0] not in engine.generate(prompts()[:1], strong)[0].tokens
    engine.generate(prompts()[:1], strong, on_tokens=lambda new: True)
    for _ in range(2):
        assert engine.generate(prompts()[:1], SamplingParams(NEW_TOKENS, ignore_eos=True))[0].tokens == plain
    outputs = engine.generate(prompts()[:6], params()[:6])
    assert [output.tokens for output in outputs] == wanted()[:6]


@pytest.mark.parametrize("name", ["none", "eagle3-tree"])
def test_log_probabilities_are_of_the_logits_with_penalties(name: str, device: torch.device) -> None:
    sampling = SamplingParams(8, ignore_eos=True, frequency_penalty=1.0, logit_bias={7: 9.0}, logprobs=3)
    (output,) = make_engine(name, device).generate(prompts()[:1], sampling)
    assert output.logprobs is not None
    for i, entry in enumerate(output.logprobs):
        prompt, generated = output.prompt_tokens, output.tokens[:i]
        with torch.inference_mode():
            x = reference_model()(torch.tensor([prompt + generated])).logits[0, -1]
        want = torch.log_softmax(logits_with(x.clone(), prompt, generated, sampling), -1)
        assert entry.logprob == pytest.approx(float(want[output.tokens[i]]), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(want.topk(3)[0].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"presence_penalty": float("nan")},
            "SamplingParams: presence_penalty is nan, expected a finite number of 32 bits",
        ),
        (
            {"frequency_penalty": float("inf")},
            "SamplingParams: frequency_penalty is inf, expected a finite number of 32 bits",
        ),
        (
            {"repetition_penalty": 0},
            "SamplingParams: repetition_penalty is 0, expected a finite number of 32 bits above 0",
        ),
        ({"logit_bias": {3: float("inf")}}, "SamplingParams: logit_bias[3] is inf, expected a finite number or -inf"),
        ({"logit_bias": {"3": 1}}, "SamplingParams: logit_bias has a str, expected token ids"),
    ],
)
def test_penalties_refuse_bad_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        SamplingParams(**given)
    assert str(error.value) == message


def test_logit_bias_of_unknown_token_is_refused() -> None:
    engine = make_engine("none")
    vocab = engine.target.config.vocab_size
    for token in (-1, vocab):
        with pytest.raises(ValueError) as error:
            engine.submit([1, 2], SamplingParams(logit_bias={token: 1.0}))
        want = f"SamplingParams: logit_bias has token {token}, expected 0 to {vocab - 1} (the model's vocabulary)"
        assert str(error.value) == want
