"""Rounds of synthetic drafts by the ops alone: right as often as published heads, and calibrated or not yet.

A tree by calibrated scores accepts what a chain of as many nodes does, and the budget expects what comes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels._C import Budget, RoundCosts
from specdec_kernels.engine.device.round import most_nodes
from specdec_kernels.engine.drafts import Needs
from specdec_kernels.synthetic.acceptance import DOMAINS, MOST_CANDIDATES, PublishedAcceptance
from support.exhaustive import exhaustive
from support.simulated_budget import BATCHES, ROWS, US, WIDTH

INT = torch.int32
TEXT, VOCAB = 8000, 32000  # tokens of the text, and of the draft's vocabulary
TOPK, STEPS, NODES = 4, 7, 8
NEEDS = Needs(num_nodes=48, accept_width=WIDTH, num_steps=WIDTH - 1)


class Drafts(NamedTuple):
    """Drafts after each token of a text whose tokens are 0, 1, 2, ...: [TEXT, K], best first."""

    tokens: Tensor
    logprobs: Tensor

    def after(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at = tokens.long() % TEXT
        return self.tokens[at, :k].contiguous(), self.logprobs[at, :k].contiguous()


@functools.cache
def synthetic_drafts(domain: str, temperature: float) -> Drafts:
    """Return drafts of a head with published acceptance; a temperature of its logits below 1 makes it overconfident."""
    logits = PublishedAcceptance(domain).logits(TEXT, MOST_CANDIDATES) / temperature
    others = torch.full((TEXT, 1), VOCAB - logits.shape[1]).log()  # of logit 0
    log_p = torch.cat([logits, others], 1).log_softmax(1)[:, :-1]
    logprobs, ahead = log_p.topk(10, 1)
    return Drafts((torch.arange(TEXT)[:, None] + ahead + 1).to(INT), logprobs.float())


class Drafted(NamedTuple):
    tree: sd.Tree
    scores: Tensor  # [B, N]
    right: Tensor  # [B, N]: nodes on the text's own path, at which depth; 0 of all others


def draft(drafts: Drafts, roots: Tensor, k: int, num_steps: int, num_nodes: int, table: Tensor | None) -> Drafted:
    lens = torch.zeros(len(roots), dtype=INT)
    given = drafts.after(roots, k)
    candidates, frontier = sd.expand_root(*given, lens, num_steps, calibration=table)
    tokens = frontier.tokens
    for step in range(2, num_steps + 1):
        given = drafts.after(tokens, k)
        tokens = sd.expand_tree(*given, step, candidates, frontier, lens, calibration=table).tokens
    scores = torch.empty(len(roots), num_nodes)
    tree = sd.build_tree(candidates, roots, lens, num_nodes, out_scores=scores)
    depths = tree.positions  # texts begin at 0, and no path is longer than the tokens that it goes ahead
    there = torch.arange(num_nodes) < tree.num_nodes[:, None]
    return Drafted(tree, scores, torch.where(there & (tree.tokens - roots[:, None] == depths), depths, 0))


def learn(calibration: sd.Calibration, drafted: Drafted, emitted: Tensor) -> None:
    tokens = drafted.tree.tokens[:, :1] + 1 + torch.arange(STEPS + 1, dtype=INT)
    path = torch.zeros_like(tokens)
    sd.update_calibration(calibration, drafted.tree, drafted.scores, sd.Accepted(tokens, emitted.to(INT), path))


def accepted(right: Tensor, num_nodes: int) -> float:
    """Of the first nodes of each tree, which are trees."""
    return float(right[:, :num_nodes].amax(1).double().mean())


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_a_tree_by_calibrated_scores_accepts_what_a_chain_of_as_many_nodes_does(
    domain: str, temperature: float
) -> None:
    """At every budget, of rounds from the same roots."""
    drafts, calibration = synthetic_drafts(domain, temperature), sd.make_calibration(STEPS, torch.empty(0))
    roots = torch.randint(0, TEXT, (64,), dtype=INT)
    for _ in range(60):
        drafted = draft(drafts, roots, TOPK, STEPS, 16, calibration.table)
        emitted = 1 + drafted.right.amax(1)
        learn(calibration, drafted, emitted)
        roots = (roots + emitted) % TEXT
    roots = torch.arange(TEXT, dtype=INT)
    tree, untaught, chain = (
        draft(drafts, roots, k, STEPS, NODES, table).right
        for k, table in ((TOPK, calibration.table), (TOPK, None), (1, None))
    )
    budgets = range(2, NODES + 1)
    trees, chains = ([accepted(right, nodes) for nodes in budgets] for right in (tree, chain))
    assert all(of_tree > 0.9985 * of_chain for of_tree, of_chain in zip(trees, chains, strict=True))
    assert trees[-1] > (1.05 if domain == "chat" else 1.005) * chains[-1]
    if temperature == 2:  # as it says, all paths are as good: without calibration it drafts too many and none far
        assert accepted(untaught, NODES) < 0.9 * chains[-1]


@pytest.mark.parametrize(
    ("size", "domain", "temperature"),
    [*exhaustive((0, "chat", 1.0)), (1, "code", 2.0), (2, "chat", 0.5), *exhaustive((3, "math", 2.0))],
)
def test_the_budget_expects_what_comes(size: int, domain: str, temperature: float) -> None:
    """Predicted and observed acceptance agree over 1000 rounds, at levels chosen by the costs of an H200.

    Drafts are calibrated meanwhile, and some rounds have been learned from before.
    """
    batch, levels = BATCHES[size], torch.tensor(ROWS[size], dtype=INT)
    limits = torch.tensor([most_nodes(batch, rows, NEEDS) for rows in ROWS[size]], dtype=INT)
    drafts, calibration = synthetic_drafts(domain, temperature), sd.make_calibration(WIDTH - 1, torch.empty(0))
    budget, last = Budget(RoundCosts(BATCHES, ROWS, US), WIDTH), 0
    roots = torch.randint(0, TEXT, (batch,), dtype=INT)
    expected = came = 0.0
    chosen = set()
    for number in range(1000 + (learning := 1000 if batch == 1 else 300)):
        level = budget.next_level(size, batch, 0)
        rows, most = ROWS[size][level], int(limits[level])
        emitted = torch.ones(batch, dtype=torch.int64)
        gains = torch.zeros(2, len(levels))
        if rows > batch:
            k = min(10, max(64 // batch, -(-most // 4), 2))
            drafted = draft(drafts, roots, k, min(WIDTH - 1, most - 1), most, calibration.table)
            shares = sd.allocate_nodes(drafted.scores, rows, budget_levels=levels, level_limits=limits)
            nodes = torch.arange(most)
            for r in range(level + 1):
                inside = (nodes > 0) & (nodes < limits[r]) & (drafted.scores >= shares.cuts[r])
                inside &= nodes < shares.num_nodes[:, None]
                gains[0, r] = drafted.scores[inside].exp().sum()
                gains[1, r] = torch.where(inside, drafted.right, 0).amax(1).sum()
            right = torch.where(nodes < shares.num_nodes[:, None], drafted.right, 0)
            emitted += right.amax(1)
            learn(calibration, drafted, emitted)
        if number >= learning:
            expected += batch * budget.expected_tokens(size, level, batch)
            came += int(emitted.sum())
            chosen.add(level)
        shown = min(level, last) + 1
        budget.update_cost(size, level, batch, 0, US[size][level])
        budget.update_gain(size, level, batch, gains[0, :shown].tolist(), gains[1, :shown].tolist())
        roots, last = (roots + emitted.to(INT)) % TEXT, level
    assert expected == pytest.approx(came, rel=0.03)
    assert max(chosen) > 0
