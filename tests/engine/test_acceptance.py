"""Published acceptance: the synthetic text has the published rates, its drafts are calibrated, and engines reach them."""

from __future__ import annotations

from itertools import chain
from statistics import mean, quantiles

import pytest
import torch
from torch import Tensor

from specdec_kernels.engine import Eagle3, Engine, NewTokens, SamplingParams
from specdec_kernels.synthetic.acceptance import (
    ACCEPT_LENGTHS_BY_CONTEXT,
    CERTAIN,
    DOMAINS,
    DRAFTERS,
    MOST_CANDIDATES,
    PublishedAcceptance,
    mean_accept_length,
)
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm, synthetic_eagle3
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

CPU = torch.device("cpu")
TEXT = 32000  # tokens, as at a published head's draft vocabulary

# Accept lengths of 7 drafts in the paper's table 1, and of 3, 7, 11 and 15 in its figure 4.
PUBLISHED = {
    "math": {"eagle3": 4.55, "dflash": 4.78, "dspark": 5.56},
    "code": {"eagle3": 3.90, "dflash": 4.47, "dspark": 5.16},
    "chat": {"eagle3": 2.41, "dflash": 2.97, "dspark": 3.51},
}
BY_LENGTH = {
    ("math", "dflash"): (3.32, 4.80, 5.39, 5.54),
    ("math", "dspark"): (3.54, 5.57, 6.62, 7.19),
    ("code", "dflash"): (3.23, 4.44, 4.85, 4.96),
    ("code", "dspark"): (3.41, 5.12, 5.89, 6.25),
    ("chat", "dflash"): (2.61, 2.95, 3.02, 3.03),
    ("chat", "dspark"): (2.80, 3.49, 3.66, 3.70),
}

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_domain = pytest.mark.parametrize("domain", DOMAINS)


def log_chances(domain: str, drafter: str, count: int = TEXT, room: int = MOST_CANDIDATES) -> Tensor:
    """Return [count, K]: the draft's log-probability, after a token of the text, of the token K ahead; -inf: no candidate."""
    logits = PublishedAcceptance(domain, drafter).logits(count, room)
    return torch.where(logits == 0, -torch.inf, logits - CERTAIN)


def emitted(chances: Tensor, num_steps: int, topk: int, num_nodes: int) -> list[int]:
    """Tokens of a greedy round that starts at each token of the text, by the rule of EAGLE-2's trees."""
    count, width = chances.shape
    topk = min(topk, width)
    scores, ahead = chances.topk(topk, 1)
    at = torch.arange(count)[:, None] + ahead + 1
    right = ahead == 0
    all_scores, depths = [scores], [right.long()]
    for depth in range(2, num_steps + 1):
        gained, ahead = chances[at % count].topk(topk, 2)
        scores = (scores[..., None] + gained).flatten(1)
        at = (at[..., None] + ahead + 1).flatten(1)
        right = (right[..., None] & (ahead == 0)).flatten(1)
        all_scores.append(scores)
        depths.append(right.long() * depth)
        scores, best = scores.topk(topk, 1)
        at, right = at.gather(1, best), right.gather(1, best)
    every_score, every_depth = torch.cat(all_scores, 1), torch.cat(depths, 1)
    kept = every_score.topk(min(num_nodes - 1, every_score.shape[1]), 1).indices
    lengths: list[int] = (every_depth.gather(1, kept).amax(1) + 1).tolist()
    return lengths


def rounds_of(lengths: list[int], start: int, tokens: int) -> list[int]:
    """Return the rounds that write `tokens` of the text from `start` on; the last may write more."""
    rounds, written = [], 0
    while written < tokens:
        rounds.append(lengths[(start + written) % len(lengths)])
        written += rounds[-1]
    return rounds


def emitted_by_chains(chances: Tensor, drafts: int) -> list[int]:
    """Return the tokens of each round of chains, which follow the best candidate alone."""
    right = chances.argmax(1) == 0
    runs = torch.stack([right.roll(-k) for k in range(drafts)], 1).long().cumprod(1).sum(1) + 1
    lengths: list[int] = runs.tolist()
    return lengths


def chain_length(chances: Tensor, drafts: int) -> float:
    return mean(rounds_of(emitted_by_chains(chances, drafts), 0, len(chances)))


@every_drafter
@every_domain
def test_chains_accept_what_was_published(domain: str, drafter: str) -> None:
    chances = log_chances(domain, drafter)
    rates = PublishedAcceptance(domain, drafter).rates
    rounds = torch.tensor(rounds_of(emitted_by_chains(chances, len(rates)), 0, TEXT))
    if drafter in PUBLISHED[domain]:
        assert rounds.double().mean() == pytest.approx(PUBLISHED[domain][drafter], abs=0.05)
    assert rounds.double().mean() == pytest.approx(mean_accept_length(rates), abs=0.02)
    for k, rate in enumerate(rates, 1):
        assert ((rounds > k).sum() / (rounds >= k).sum()).item() == pytest.approx(rate, abs=0.015), k
    for drafts in (3, min(5, len(rates))):
        assert chain_length(chances, drafts) == pytest.approx(mean_accept_length(rates[:drafts]), abs=0.13)
    for drafts, published in zip((3, 7, 11, 15), BY_LENGTH.get((domain, drafter), ()), strict=False):
        assert chain_length(chances, drafts) == pytest.approx(published, abs=0.2)


@every_drafter
@every_domain
def test_trees_of_as_many_nodes_lose_little_and_wider_ones_gain(domain: str, drafter: str) -> None:
    chances = log_chances(domain, drafter, 4000)
    tree = mean(rounds_of(emitted(chances, 7, 4, 8), 0, 4000))
    assert tree >= chain_length(chances, 7) - 0.35
    chain_of_5 = chain_length(chances, 5)
    assert mean(rounds_of(emitted(chances, 5, 10, 32), 0, 4000)) > chain_of_5 + min(0.4, 0.3 * (6 - chain_of_5))


@every_domain
def test_a_candidate_is_right_as_often_as_the_draft_thinks(domain: str) -> None:
    chances = log_chances(domain, "eagle3").exp()
    assert chances.sum(1).max() < 1 + 1e-9
    best = chances.max(1)
    groups = [
        (best.values, best.indices == 0),  # of the best candidates
        (chances.flatten(), (torch.arange(chances.shape[1]) == 0).expand_as(chances).flatten()),  # and of all
    ]
    for thought, right in groups:
        for low in torch.arange(0.05, 1, 0.05).tolist():
            bin_ = (thought >= low) & (thought < low + 0.05)
            if bin_.sum() >= 500:
                error = 3 * (0.25 / bin_.sum().item()) ** 0.5
                assert right[bin_].double().mean().item() == pytest.approx(thought[bin_].mean().item(), abs=error)


def test_simulated_acceptance_differs_by_request() -> None:
    """Between stretches of 215 tokens, accept lengths vary by about as much as adjacent ten seconds of a server do."""
    lengths = emitted_by_chains(log_chances("code", "eagle3"), 7)
    tenths = quantiles([mean(rounds_of(lengths, start, 215)) for start in range(0, TEXT, 250)], n=10)
    assert tenths[0] < 3.0 and tenths[-1] > 5.0


def test_acceptance_falls_with_the_context() -> None:
    short, fresh = PublishedAcceptance("code", context=1500), PublishedAcceptance("code")
    assert short.rates == pytest.approx(fresh.rates)
    drafts = mean_accept_length(fresh.rates) - 1
    for i, length in enumerate(ACCEPT_LENGTHS_BY_CONTEXT):
        kept = (length - 1) / (ACCEPT_LENGTHS_BY_CONTEXT[0] - 1)
        there = PublishedAcceptance("code", context=2000 * (i + 1))
        assert mean_accept_length(there.rates) == pytest.approx(1 + kept * drafts, abs=1e-6)
    between = mean_accept_length(PublishedAcceptance("code", context=5000).rates)
    assert mean_accept_length(PublishedAcceptance("code", context=6000).rates) < between
    assert PublishedAcceptance("code", context=10**6).name == "code eagle3 at 1000000 tokens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poetry",), "PublishedAcceptance: domain is 'poetry', expected one of chat, code, math"),
        (("chat", "medusa"), "PublishedAcceptance: drafter is 'medusa', expected one of eagle3, dflash, dspark, mtp"),
    ],
)
def test_unknown_names_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        PublishedAcceptance(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(("topk", "nodes"), [(1, 8), (4, 16)], ids=["chain", "tree"])
def test_engine_accepts_drafts_as_the_logits_say(device: torch.device, topk: int, nodes: int) -> None:
    """Round by round: the synthetic model is made from the logits, computes them, and they decide the tree."""
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    count = len(text.order)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    acceptance = PublishedAcceptance("chat")
    target = synthetic_causal_lm(config, text, device=device, dtype=dtype)
    head = synthetic_eagle3(target, text, acceptance)
    engine = Engine(
        target,
        draft=Eagle3(head, num_steps=7, topk=topk, num_nodes=nodes),
        adaptive=False,
        max_len=count // 4 + 20,
        num_slots=4,
        device=device,
        dtype=dtype,
    )
    rounds: dict[int, list[int]] = {i: [] for i in range(4)}

    def on_tokens(new: NewTokens) -> None:
        rounds[new.index].append(len(new.tokens))

    starts = [i * count // 4 for i in range(4)]
    prompts = [text.tokens(start, 10) for start in starts]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=count // 4), on_tokens=on_tokens)
    for start, output in zip(starts, outputs, strict=True):
        assert output.tokens == text.tokens(start + 10, count // 4)

    logits = acceptance.logits(count, 4)
    chances = torch.where(logits == 0, -torch.inf, logits - CERTAIN)
    lengths = emitted(chances, 7, topk, nodes)
    if topk == 1:
        assert lengths == emitted_by_chains(chances, 7)
    # The first token is prefill's, from which the first round of drafts begins; a request's last may be cut by its budget.
    assert [rounds[i][0] for i in range(4)] == [1] * 4
    expected = [rounds_of(lengths, start + 10, count // 4 - 1) for start in starts]
    reached = [rounds[i][1:] for i in range(4)]
    if topk == 1 and device.type == "cpu":
        assert [r[:-1] for r in reached] == [r[:-1] for r in expected]
        assert mean(chain.from_iterable(reached)) == pytest.approx(PUBLISHED["chat"]["eagle3"], abs=0.15)
    assert mean(chain.from_iterable(reached)) == pytest.approx(mean(chain.from_iterable(expected)), abs=0.15)
