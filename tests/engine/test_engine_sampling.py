"""Sampled text is drawn from the target's distribution with the request's own noise, whatever drafts, and whatever else runs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Eagle3, Engine, Ngram, RequestOutput, SamplingParams, Standalone
from specdec_kernels.engine.device.round import Round
from support import packaged_drafts
from support.exhaustive import exhaustive, thinned
from support.packaged_drafts import HEAD, TARGET
from support.sampled_texts import KINDS, close_draws, differing
from support.tiny_checkpoint import Comparison, held_out, reference_model, reference_texts

MAX_LEN = 256
NEW_TOKENS = 32

# Every round drafts all it may: else so small a model, which costs as much for one node as for many, soon drafts little.
DRAFTS = packaged_drafts.DRAFTS | {
    "ngram": lambda: Ngram(),
    "ngram-8": lambda: Ngram(num_nodes=8),
    "eagle3-bush": lambda: Eagle3(HEAD, num_steps=2, topk=4, num_nodes=9),
}
# Slots, page size, pages beyond those of one request.
LAYOUTS = {"single": (1, 16, 0), "batched": (8, 16, 200), "page1": (3, 1, 500), "page3": (4, 3, 40)}


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:60] for prompt in held_out("code")[:12]]


def params(max_new_tokens: int = NEW_TOKENS) -> list[SamplingParams]:
    """One for each prompt: every kind, greedy ones among them, each with a seed of its own."""
    kinds = (KINDS * len(prompts()))[: len(prompts())]
    return [SamplingParams(max_new_tokens, seed=1000 + i, **kind) for i, kind in enumerate(kinds)]


def make_engine(name: str, layout: str, device: torch.device | str = "cpu") -> Engine:
    num_slots, page_size, more = LAYOUTS[layout]
    return Engine(
        TARGET,
        draft=DRAFTS[name](),
        adaptive=False,
        max_len=MAX_LEN,
        num_slots=num_slots,
        page_size=page_size,
        num_pages=-(-(MAX_LEN + 80) // page_size) + more,
        prefill_chunk=50,
        dtype=torch.float32,
        device=device,
    )


@functools.cache
def plain() -> list[RequestOutput]:
    return make_engine("none", "single").generate(prompts(), params())


IN_DEFAULT_RUN = {
    ("none", "single"), ("eagle3+ngram", "page1"), ("standalone", "page3"), ("eagle3-bush", "batched"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), thinned(itertools.product(DRAFTS, LAYOUTS), IN_DEFAULT_RUN.__contains__))
def test_sampled_text_depends_on_seed_alone(name: str, layout: str, device: torch.device) -> None:
    engine = make_engine(name, layout, device)
    outputs = engine.generate(prompts(), params())
    assert differing(outputs, plain(), params()) <= 2
    for output, sampling in zip(outputs, params(), strict=True):
        assert output.seed == (sampling.seed if sampling.temperature > 0 else None)
    if isinstance(engine.draft, Eagle3 | Standalone):
        assert sum(o.stats.accepted for o in outputs) > 0.5 * sum(o.stats.rounds for o in outputs)


@pytest.mark.parametrize("name", [*exhaustive("eagle3-tree", "eagle3-bush"), "standalone"])
def test_sampled_text_needs_visited_logits_alone(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in large rounds: the same texts and log-probabilities, whatever stands where nothing is computed."""
    each = [replace(one, logprobs=2, min_new_tokens=4, stop_token_ids=(10, 32)) for one in params()]
    want = make_engine(name, "batched", device).generate(prompts(), each)
    levels: list[int] = []
    by_levels, new_empty = Round._logits_by_depth, torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        out = new_empty(like, *size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    def noted(self: Round, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        levels.append(len(hidden))
        return by_levels(self, hidden, *rest)

    monkeypatch.setattr("specdec_kernels.engine.device.round.CHEAP_ROWS", 0)
    monkeypatch.setattr(Round, "_logits_by_depth", noted)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    got = make_engine(name, "batched", device).generate(prompts(), each)
    assert levels and differing(got, want, each) <= 1
    for a, b in zip(got, want, strict=True):
        if a.tokens == b.tokens:
            assert a.finish_reason == b.finish_reason
            logprobs = [[token.logprob for token in output.logprobs or ()] for output in (a, b)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_sampled_text_equals_reference() -> None:
    """From transformers' logits, with the noise that docs/verification.md defines."""
    for output, sampling in list(zip(plain(), params(), strict=True))[:6]:
        for at in range(0, len(output.tokens), 3):
            if sampling.temperature > 0:
                assert output.tokens[at] in close_draws(output.prompt_tokens, output.tokens[:at], sampling)


def test_greedy_rows_of_a_mixed_batch() -> None:
    greedy = [i for i, sampling in enumerate(params()) if sampling.temperature == 0]
    want = reference_texts([prompts()[i] for i in greedy], NEW_TOKENS)
    comparison = Comparison(reference_model())
    for i, text in zip(greedy, want, strict=True):
        comparison.check(prompts()[i], plain()[i].tokens, text)


@pytest.mark.parametrize("name", [*exhaustive("none"), "eagle3-tree", "ngram"])
def test_sampled_text_ignores_batch_and_order(name: str) -> None:
    engine = make_engine(name, "batched")
    order = torch.randperm(len(prompts())).tolist()[:10]
    outputs = engine.generate([prompts()[i] for i in order], [params()[i] for i in order])
    assert differing(outputs, [plain()[i] for i in order], [params()[i] for i in order]) <= 2


@pytest.mark.parametrize("name", ["eagle3-tree", *exhaustive("none", "ngram", "standalone")])
def test_sampled_text_survives_retraction(name: str) -> None:
    each = [SamplingParams(70, ignore_eos=True, temperature=0.8, seed=i) for i in range(4)]
    want = make_engine(name, "batched").generate(prompts()[:4], each)
    tight = Engine(
        TARGET, draft=DRAFTS[name](), adaptive=False, max_len=MAX_LEN, num_slots=4, page_size=4, num_pages=90, device="cpu"
    )  # fmt: skip
    got = tight.generate(prompts()[:4], each)
    assert tight.core.scheduler.num_retractions > 0
    assert differing(got, want, each) <= 1


def test_other_seeds_give_other_texts() -> None:
    engine = make_engine("eagle3-tree", "batched")
    prompt = prompts()[0]
    outputs = engine.generate(
        [prompt] * 6, [SamplingParams(NEW_TOKENS, temperature=1.0, seed=s) for s in (1, 1, 2, 3, -4, 2**62)]
    )
    texts = [tuple(output.tokens) for output in outputs]
    assert texts[0] == texts[1] and len(set(texts)) == 5


def test_drawn_seed_is_reported_and_repeatable() -> None:
    engine = make_engine("ngram", "batched")
    unseeded = SamplingParams(NEW_TOKENS, temperature=1.0)
    outputs = engine.generate([prompts()[0]] * 3, unseeded) + engine.generate([prompts()[0]], unseeded)
    assert len({output.seed for output in outputs}) == len({tuple(output.tokens) for output in outputs}) == 4
    seeded = SamplingParams(NEW_TOKENS, temperature=1.0, seed=outputs[1].seed)
    # Alone, GEMMs have other shapes: a draw that is too close to call may differ.
    assert differing(engine.generate([prompts()[0]], seeded), outputs[1:2], [seeded]) <= 1


@pytest.mark.parametrize(
    "narrow",
    [
        {"temperature": 1e-3},
        {"temperature": 1e-30},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_sampling_of_one_token_is_greedy(narrow: dict[str, Any]) -> None:
    want = reference_texts(prompts()[:4], NEW_TOKENS)
    outputs = make_engine("eagle3-tree", "batched").generate(
        prompts()[:4], SamplingParams(NEW_TOKENS, seed=5, **narrow)
    )
    comparison = Comparison(reference_model())
    for prompt, output, text in zip(prompts(), outputs, want, strict=False):
        comparison.check(prompt, output.tokens, text)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5, expected a number from 0 (greedy) on"),
        ({"temperature": float("nan")}, "temperature is nan, expected a number from 0 (greedy) on"),
        ({"temperature": 1e39}, "temperature is 1e+39, expected a number from 0 (greedy) on"),
        ({"temperature": "hot"}, "temperature is hot, expected a number"),
        ({"temperature": True}, "temperature is True, expected a number"),
        ({"top_p": None}, "top_p is None, expected a number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, expected an integer"),
        ({"max_new_tokens": 10**30}, f"max_new_tokens is {10**30}, expected at most 2147483647"),
        ({"seed": 1.5}, "seed is 1.5, expected an integer"),
        ({"stop": 5}, "stop is 5, expected a string or strings"),
        ({"stop": [5]}, "stop is [5], expected a string or strings"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, expected a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected true or false"),
        ({"logit_bias": [5]}, "logit_bias is [5], expected a number for each token id"),
        ({"logit_bias": {5: "a"}}, "logit_bias[5] is a, expected a finite number or -inf"),
        ({"logit_bias": {5: 1e39}}, "logit_bias[5] is 1e+39, expected a finite number or -inf"),
        ({"json_schema": 5}, "json_schema is 5, expected a JSON schema"),
        ({"regex": 5}, "regex is 5, expected a string"),
        ({"logprobs": 1.5}, "logprobs is 1.5, expected True, or 0 to 20"),
        ({"timeout": "5"}, "timeout is 5, expected seconds above 0, or None"),
        ({"temperature": float("inf")}, "temperature is inf, expected a number from 0 (greedy) on"),
        ({"top_k": -1}, "top_k is -1, expected at least 1, or 0 for all tokens"),
        ({"top_k": 2**31}, "top_k is 2147483648, expected at least 1, or 0 for all tokens"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5, expected above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1, expected 0 to 1"),
        ({"min_p": 2}, "min_p is 2, expected 0 to 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808, expected 64 bits with a sign, or None"),
    ],
    ids=str,
)
def test_sampling_params_refuse_bad_values(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**bad)
    assert str(error.value) == f"SamplingParams: {message}"
