"""`specdec generate` says of two texts that differ whether roundoff explains it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import cli
from specdec_kernels.cli.near_tie import difference, difference_at, difference_of_ranks, likeliest
from specdec_kernels.engine import Engine, RequestOutput, SamplingParams
from specdec_kernels.engine.grammars import Matcher, NewMatcher
from specdec_kernels.reference.verify import filtered, uniform
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

GREEDY = SamplingParams()


def model_of(logits: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return a target with these logits [V] after any text."""

    class Model:
        device = torch.device("cpu")

        def __call__(self, tokens: Tensor, logits_to_keep: int) -> Any:
            self.asked = tokens.tolist()
            return SimpleNamespace(logits=logits[None, None].expand(1, logits_to_keep, -1))

    model: Any = Model()
    model.dtype = dtype
    return model


def test_difference_of_equal_texts_is_none() -> None:
    assert difference(None, [1], ([2, 3], [2, 3]), GREEDY) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_difference_takes_the_larger_margin(dtype: torch.dtype) -> None:
    limit = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}[dtype]
    logits = torch.tensor([0.0, 5.0, 5.0 - 0.9 * limit, 5.0 - 1.1 * limit])
    model = model_of(logits, dtype)
    near = difference(model, [9, 9], ([7, 1, 4], [7, 2, 4]), GREEDY)
    assert near is not None and near.is_near_tie and near.at == 1
    assert near.margin == pytest.approx(0.9 * limit, rel=1e-3)
    assert model.asked == [[9, 9, 7]]
    for pair in ((1, 3), (3, 1), (2, 3)):  # the two are near each other, or not, but not both the best
        far = difference(model, [9, 9], ([7, pair[0]], [7, pair[1]]), GREEDY)
        assert far is not None and not far.is_near_tie


def test_difference_of_a_shorter_text_is_no_near_tie() -> None:
    parted = difference(model_of(torch.zeros(4)), [1], ([2, 3], [2, 3, 3]), GREEDY)
    assert parted is not None and parted.at == 2 and parted.margin == math.inf and not parted.is_near_tie


FILTERS = {}, {"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.2}


@pytest.mark.parametrize("filters", FILTERS)
def test_likeliest_equals_the_reference(filters: dict[str, Any]) -> None:
    logits = 2 * torch.randn(200, dtype=torch.float64)
    sampling = SamplingParams(temperature=0.8, **filters)
    torch.testing.assert_close(likeliest(logits, sampling, 0.0), filtered(logits, 0.8, **filters))


@pytest.mark.parametrize(("gap", "is_near"), [(1e-5, True), (0.02, False)])
def test_tokens_at_the_edge_of_a_filter_may_change_places(gap: float, is_near: bool) -> None:
    """Of two tokens one is kept, and the number is drawn for the first token or for it."""
    logits = torch.tensor([1.0, 1.0 - gap, 2.0], dtype=torch.float64)
    seed = next(seed for seed in range(99) if uniform(seed, 1) < 0.2)  # token 2 begins at 0.27
    parted = difference(model_of(logits), [4], ([0], [1]), SamplingParams(temperature=1.0, seed=seed, top_k=2))
    assert parted is not None and parted.is_near_tie == is_near


def test_difference_of_sampled_tokens_near_a_boundary() -> None:
    seed, prompt, text = 11, [4, 4, 4], [8, 8]
    u = uniform(seed, 5)  # at the token that differs
    sampling = SamplingParams(temperature=1.0, seed=seed)
    for gap, near in ((1e-5, True), (0.01, False)):
        p = torch.tensor([u - gap, gap, 0.5 * (1 - u), 0.5 * (1 - u)], dtype=torch.float64)
        for other in (0, 1):  # the number is where token 2 begins, right after token 1
            parted = difference(model_of(p.log()), prompt, ([*text, 2], [*text, other]), sampling)
            assert parted is not None and parted.at == 2
            assert parted.is_near_tie == (near or other == 1)


def test_difference_of_sampled_tokens_has_no_margin() -> None:
    """The distance of an engine's token to its random number is 0 at any position: seeds and positions are right."""
    engine = Engine(tiny_model("target"), max_len=256, device="cpu")
    sampling = SamplingParams(24, temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=5, ignore_eos=True)
    prompt = held_out("code")[0]
    (output,) = engine.generate([prompt], sampling)
    margins = []
    for at, token in enumerate(output.tokens):
        other = (*output.tokens[:at], 0 if token else 1)
        parted = difference(engine.target.model, prompt, (list(output.tokens[: at + 1]), list(other)), sampling)
        assert parted is not None and parted.at == at
        margins.append(parted.margin)
        with torch.inference_mode():
            logits = engine.target.model(torch.tensor([prompt + output.tokens[:at]])).logits[0, -1].double()
        p = likeliest(logits, sampling, 0.0)
        end = float(p.cumsum(0)[token])
        assert end - float(p[token]) - 1e-4 <= uniform(5, len(prompt) + at) <= end + 1e-4
    assert sum(margin > 0.01 for margin in margins) > 12


@pytest.mark.parametrize("at", [0, 7])
def test_difference_of_ranks_is_that_of_a_whole_target(at: int) -> None:
    prompt = held_out("code")[0]
    with Engine(tiny_model("target"), max_len=256, device="cpu", dtype=torch.float32) as engine:
        text = engine.generate([prompt], SamplingParams(12, ignore_eos=True))[0].tokens
        params = SamplingParams(at + 1, ignore_eos=True, generated_token_ids=text[:at], logprobs=20)
        logprobs = engine.generate([prompt], params)[0].logprobs
        assert logprobs is not None
        listed = [token for token, _ in logprobs[0].top]
        unlisted = next(token for token in range(100) if token not in listed)
        for other in (*listed[1:4], unlisted):
            texts = text, [*text[:at], other, *text[at + 1 :]]
            want = difference(engine.target.model, prompt, texts, GREEDY)
            got = difference_of_ranks(engine, prompt, texts, GREEDY)
            assert want is not None and got is not None and (got.at, got.limit) == (want.at, want.limit) == (at, 1e-3)
            assert got.margin == (math.inf if other == unlisted else pytest.approx(want.margin, abs=1e-4))
        assert difference_of_ranks(engine, prompt, (text, text), GREEDY) is None
        assert difference_of_ranks(engine, prompt, (text, text[:5]), GREEDY) == difference(
            engine.target.model, prompt, (text, text[:5]), GREEDY
        )
        with pytest.raises(ValueError, match=f"sampled texts differ from token {at} on, and ranks with parts"):
            difference_of_ranks(engine, prompt, texts, SamplingParams(temperature=1.0, seed=1))


def test_generate_reports_a_difference_that_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = Engine.generate

    def wrong(self: Engine, *arguments: Any, **options: Any) -> list[RequestOutput]:
        outputs = generate(self, *arguments, **options)
        if self.config.needs.num_nodes > 1:
            outputs[0].tokens[5] += 1
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["generate", "--device", "cpu", "--max-new-tokens", "12"]) == 1
    out = capsys.readouterr().out
    assert "NGRAM produced other tokens from token 5 on, which is an error: a margin of" in out
    assert "near-tie" not in out


def test_difference_uses_edited_logits() -> None:
    model = model_of(torch.tensor([0.0, 5.0, 4.0, 3.0]))
    sampling = SamplingParams(presence_penalty=0.5, repetition_penalty=2.0, logit_bias={2: -2.0})
    parted = difference(model, [3], ([1, 2], [1, 3]), sampling)  # 1 and 3 are repeated, 1 was generated
    assert parted is not None and parted.at == 1
    assert parted.margin == pytest.approx(0.5)  # 2.0, 2.0 and 1.5


class Letters(Matcher):
    """A grammar in which token 1 comes first, and then tokens 2 and 3."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept(self, token: int) -> bool:
        self.tokens.append(token)
        return token == 1 if len(self.tokens) == 1 else token in (2, 3)

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    def fill(self, mask: Tensor) -> None:
        mask.fill_(0b1100 if self.tokens else 0b10)

    @property
    def has_ended(self) -> bool:
        return False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_difference_at_a_token_that_the_grammar_forbids_is_no_near_tie(temperature: float) -> None:
    """Tokens 2 and 3 are as likely as each other; so is token 0, which the grammar does not allow."""
    sampling = SamplingParams(temperature=temperature, seed=7)
    drawn = uniform(7, 3)
    p = torch.tensor([0.5, 0.5, drawn, 1 - drawn]) if temperature else torch.tensor([0.25, 0.25, 0.25, 0.25])

    def margin(first: int, second: int, makes: Any) -> float:
        return difference_at(1, p.log(), [0, 0], ([1, first], [1, second]), sampling, 8e-6, makes).margin

    new_matcher = NewMatcher(Letters, 4)
    assert margin(2, 3, new_matcher) < 1e-6
    assert margin(0, 2, new_matcher) == margin(3, 1, new_matcher) == math.inf
    assert margin(0, 2, None) < math.inf
