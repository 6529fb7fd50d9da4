"""Drafts of a chain that are drawn: the text has the target's distribution still, and more of them are accepted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from specdec_kernels.engine import (
    DraftBudget,
    Eagle,
    Eagle3,
    Engine,
    Ngram,
    Proposal,
    SamplingParams,
    Standalone,
    Union,
)
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive
from support.sampled_texts import distribution, expect_distribution
from support.tiny_checkpoint import Comparison, accept_length, held_out, reference_model, reference_texts

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
NEW_TOKENS = 32


def make_engine(device: torch.device | str, steps: int = 4, drawn: bool = True, **options: Any) -> Engine:
    draft = Eagle3(HEAD, num_steps=steps, topk=1, sampled=drawn)
    given = {"max_len": 192, "num_slots": 8, "dtype": torch.float32, "device": device, "adaptive": False} | options
    return Engine(TARGET, draft=draft, **given)


def prompts(count: int) -> list[list[int]]:
    return [prompt[:60] for prompt in held_out("code")[:count]]


@pytest.mark.parametrize(("number", "top_k", "temperature"), [*exhaustive((13, 3, 1.0)), (16, 4, 1.6)])
def test_texts_have_the_distribution_of_the_target(
    device: torch.device, number: int, top_k: int, temperature: float
) -> None:
    """Chi-square of the tokens after the first: one followed by drafts, and two in a block or after one."""
    count, prompt = 1500, held_out("code")[number][:30]
    engine = make_engine(device, steps=2, num_slots=100, prefix_cache=True, page_size=4)  # prefills the prompt once
    params = [
        SamplingParams(4, ignore_eos=True, seed=seed, temperature=temperature, top_k=top_k) for seed in range(count)
    ]
    outputs = engine.generate([prompt] * count, params)
    freedom = expect_distribution(outputs, distribution(reference_model(), prompt, params[0]))
    assert freedom > 8 and accept_length(outputs) > 1.4 and engine.stats().prefix_hits == count - 1


@pytest.mark.parametrize(("temperature", "gain"), [*exhaustive((0.7, 0.2)), (1.0, 0.3)])
def test_sampled_drafts_raise_acceptance(temperature: float, gain: float) -> None:
    lengths = {}
    for drawn in (False, True):
        params = [SamplingParams(48, ignore_eos=True, temperature=temperature, seed=i) for i in range(8)]
        lengths[drawn] = accept_length(make_engine("cpu", drawn=drawn).generate(prompts(8), params))
    print(lengths)
    assert lengths[True] > lengths[False] + gain


def test_greedy_requests_beside_drawn_ones(device: torch.device) -> None:
    engine = make_engine(device)
    params = [SamplingParams(NEW_TOKENS, temperature=0.9 * (i % 2), seed=i) for i in range(12)]
    outputs = engine.generate(prompts(12), params)
    want = reference_texts(prompts(12)[::2], NEW_TOKENS)
    comparison = Comparison(reference_model())
    for output, text in zip(outputs[::2], want, strict=True):
        comparison.check(output.prompt_tokens, output.tokens, text)
    assert len(comparison.near_ties) <= 1


def test_sampled_drafts_seed_repeats_text(device: torch.device) -> None:
    engine = make_engine(device)
    params = [SamplingParams(NEW_TOKENS, temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    texts = [tuple(o.tokens) for o in engine.generate([prompts(1)[0]] * 4, params)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert texts == [tuple(o.tokens) for o in engine.generate([prompts(1)[0]] * 4, params)]


def test_sampled_drafts_differ_by_round() -> None:
    """A position that is drafted in several rounds gets other noise in each: what was rejected does not come back."""
    engine = make_engine("cpu")
    drawn: dict[int, list[int]] = {}
    propose = engine.draft.propose

    def keep(slots: torch.Tensor, budget: DraftBudget) -> Proposal:
        proposal = propose(slots, budget)
        tree = scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state).tree
        for position, token in zip(tree.positions[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True):
            drawn.setdefault(position, []).append(token)
        return proposal

    engine.draft.propose = keep  # type: ignore[assignment, method-assign]
    engine.generate(prompts(1)[0], SamplingParams(100, ignore_eos=True, temperature=2.5, seed=1))
    several = [tokens for tokens in drawn.values() if len(tokens) > 1]
    pairs = [a == b for tokens in several for a, b in itertools.pairwise(tokens)]
    assert len(pairs) > 50 and sum(pairs) < 0.3 * len(pairs), f"{sum(pairs)} of {len(pairs)}"


@pytest.mark.parametrize("kind", [Eagle, Eagle3, Standalone])
def test_sampled_tree_is_refused(kind: type) -> None:
    with pytest.raises(ValueError) as error:
        kind("x", topk=2, sampled=True)
    assert str(error.value) == f"{kind.__name__}: sampled is True with topk=2, expected topk=1 (a chain can be drawn)"


def test_union_refuses_sampled_drafts() -> None:
    with pytest.raises(ValueError) as error:
        Union(Ngram(), Eagle3("x", topk=1, sampled=True))
    assert str(error.value) == "Union: second is a Eagle3 with sampled=True, expected sampled=False"
