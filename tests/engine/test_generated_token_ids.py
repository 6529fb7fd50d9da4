"""Requests that begin with generated tokens go on as the request that generated them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdec_kernels.engine import Engine, RequestOutput, SamplingParams
from support.exhaustive import exhaustive
from support.request_engines import make_engine, prompts

BASE = SamplingParams(24, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
KINDS = {
    "greedy": replace(BASE, logprobs=2),
    "seeded": replace(BASE, temperature=0.9, top_p=0.9, seed=4, logprobs=True),
    "penalties": replace(BASE, **PENALTIES, logit_bias={5: 2.0, 7: -float("inf")}),
    "seeded penalties": replace(BASE, **PENALTIES, temperature=0.8, top_k=30, min_p=0.01, seed=-5, logprobs=3),
    "stop": replace(BASE, stop=["\n\n", "return", ")"], min_new_tokens=6, logprobs=True),
    "stop tokens": replace(BASE, ignore_eos=False, stop_token_ids=[*range(10, 26)], min_new_tokens=9),
    "schema": SamplingParams(48, json_schema=SCHEMA, logprobs=2),
    "schema, penalties": SamplingParams(48, json_schema=SCHEMA, **PENALTIES, temperature=1.0, seed=9, logprobs=1),
    "regex": SamplingParams(24, regex="(ab|c[0-9]{3} )+", temperature=1.0, seed=2),
    "grammar": SamplingParams(24, grammar='root ::= "def " [a-z]+ "(" ")"', presence_penalty=1.0),
    "later": SamplingParams(
        24, regex="[a-c]+", constrain_after=[10, 11], logit_bias={10: 40.0, 11: 40.0}, temperature=1.0, seed=3
    ),
}


@pytest.fixture(scope="module", params=[*exhaustive("none"), "union"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    with make_engine(request.param, grammars=True, prefix_cache=request.param == "union") as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine: Engine) -> dict[str, RequestOutput]:
    each = list(KINDS.values())
    return dict(zip(KINDS, engine.generate(prompts()[0:1] * len(each), each), strict=True))


def facts(output: RequestOutput) -> tuple[Any, ...]:
    return output.prompt_tokens, output.tokens, output.text, output.finish_reason, output.seed


@pytest.mark.parametrize("kind", KINDS)
def test_text_goes_on_from_any_cut_as_it_did(engine: Engine, whole: dict[str, RequestOutput], kind: str) -> None:
    want, params = whole[kind], KINDS[kind]
    cuts = range(1, len(want.tokens))
    assert cuts
    each = [replace(params, generated_token_ids=want.tokens[:cut]) for cut in cuts]
    for cut, got in zip(cuts, engine.generate([want.prompt_tokens] * len(cuts), each), strict=True):
        assert facts(got) == facts(want), cut
        assert got.cached_tokens <= len(want.prompt_tokens)
        if want.logprobs is not None:
            assert got.logprobs is not None and len(got.logprobs) == len(want.tokens) - cut
            for one, other in zip(got.logprobs, want.logprobs[cut:], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top[:1]] == [token for token, _ in other.top[:1]]


def test_first_new_tokens_bring_the_given_ones_and_count_as_a_round_of_their_own(
    engine: Engine, whole: dict[str, RequestOutput]
) -> None:
    want, cut = whole["greedy"], 7
    begun = replace(KINDS["greedy"], generated_token_ids=want.tokens[:cut])
    parts = list(engine.submit(want.prompt_tokens, begun))
    assert parts[0].tokens[:cut] == want.tokens[:cut] and len(parts[0].tokens) > cut
    assert [token for part in parts for token in part.tokens] == want.tokens
    assert sum(len(part.logprobs or ()) for part in parts) == len(want.tokens) - cut
    assert sum(sum(part.rounds) for part in parts) == len(want.tokens) - cut


def test_samples_begin_alike_and_prompts_are_scored_as_without(engine: Engine) -> None:
    params = SamplingParams(12, n=3, temperature=1.0, seed=5, ignore_eos=True, prompt_logprobs=1)
    outputs = engine.generate([prompts()[0]], replace(params, generated_token_ids=[5, 9, 11]))
    assert [output.tokens[:3] for output in outputs] == [[5, 9, 11]] * 3
    assert len({tuple(output.tokens) for output in outputs}) == 3
    (alone,) = engine.generate([prompts()[0]], replace(params, n=1, seed=7, generated_token_ids=[5, 9, 11]))
    assert alone.tokens == outputs[2].tokens
    (plain,) = engine.generate([prompts()[0]], replace(params, n=1))
    assert alone.prompt_logprobs is not None and plain.prompt_logprobs is not None
    for one, other in zip(alone.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None and one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"generated_token_ids": [5, -1]}, "generated_token_ids has -1, expected 0 to 2147483647"),
        (
            {"generated_token_ids": [5] * 24},
            "generated_token_ids has 24 entries, expected fewer than max_new_tokens (24)",
        ),
        ({"generated_token_ids": "ab"}, "generated_token_ids has 'a', expected 0 to 2147483647"),
        ({"generated_token_ids": None}, "generated_token_ids is None, expected a list of token ids"),
        (
            {"generated_token_ids": [5, 99999]},
            "generated_token_ids has 99999 at place 1, expected 0 to 2047 (the model's vocabulary)",
        ),
        (
            {"generated_token_ids": [5, 6], "stop_token_ids": [6]},
            "generated_token_ids has 6 at place 1, expected no stop token (the text ends there)",
        ),
        (
            {"generated_token_ids": [5, 6] * 70, "max_new_tokens": 150},
            "generated_token_ids has 140 entries, expected at most 119 after this prompt (max_len - 1 in all)",
        ),
    ],
)
def test_tokens_that_cannot_have_been_generated_are_refused(
    engine: Engine, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        engine.generate([prompts()[0]], replace(BASE, **fields))
    assert str(raised.value) == f"SamplingParams: {message}"


def test_tokens_that_a_grammar_forbids_or_a_stop_string_ends_are_refused(
    engine: Engine, whole: dict[str, RequestOutput]
) -> None:
    tokens = whole["schema"].tokens
    wrong = [*tokens[:3], tokens[0]]
    with pytest.raises(ValueError) as raised:
        engine.generate([prompts()[0]], replace(KINDS["schema"], generated_token_ids=wrong))
    expected = f"generated_token_ids has {tokens[0]} at place 3, expected a token that json_schema allows there"
    assert str(raised.value) == f"SamplingParams: {expected}"
    tokens, text = whole["greedy"].tokens, whole["greedy"].text
    assert text is not None
    with pytest.raises(ValueError, match=r"at place \d+, expected none that completes a string of stop"):
        engine.generate([prompts()[0]], replace(BASE, stop=text[3:5], generated_token_ids=tokens[:20]))
