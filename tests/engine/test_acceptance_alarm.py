"""The alarm for a draft whose tokens are not accepted any more: by given counts, and in an engine whose draft breaks."""

from __future__ import annotations

import logging
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import Candidates
from specdec_kernels.engine import (
    MTP,
    Draft,
    DraftBudget,
    Eagle3,
    Engine,
    Needs,
    Ngram,
    Proposal,
    SamplingParams,
    Standalone,
    Union,
)
from specdec_kernels.engine import acceptance as module
from specdec_kernels.engine.acceptance import AcceptanceMonitor, AcceptanceRates
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
LOGGER = module.__name__
NUM_ROUNDS = 8192  # fills a window at any number of nodes


def head() -> Eagle3:
    return Eagle3(HEAD, num_steps=3, topk=4, num_nodes=16)


def feed(monitor: AcceptanceMonitor, per_round: float, nodes: int = 3, request_id: int = 0) -> None:
    """Add one window of rounds with this many draft tokens each."""
    monitor.add(request_id, NUM_ROUNDS, NUM_ROUNDS * nodes, round(NUM_ROUNDS * per_round))


def test_a_model_that_falls_below_a_tenth_is_reported_once_and_so_is_its_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = AcceptanceMonitor(head())
    with caplog.at_level(logging.WARNING, LOGGER):
        for per_round in (1.8, 2.0, 0.25):
            feed(monitor, per_round)
        assert not caplog.records and not monitor.read().collapsed
        feed(monitor, 0.125)
        feed(monitor, 0.0)
        (warning,) = caplog.messages
        for part in ("Eagle3 (", "0.125 accepted", "0.0417 per draft token", "2 accepted", "0.667", "specdec doctor"):
            assert part in warning
        got = monitor.read()
        assert got.collapsed and got.collapses == 1 and got.recent == (0.0, 0.0)
        assert got.best is not None and got.best.per_round == 2.0
        feed(monitor, 0.3)  # above a collapse, not yet a recovery
        assert monitor.read().collapsed and len(caplog.records) == 1
        feed(monitor, 0.5)
        assert not monitor.read().collapsed and "recovered" in caplog.messages[-1]
        feed(monitor, 0.01)
    assert monitor.read().collapses == 2 and len(caplog.records) == 3


@pytest.mark.parametrize("draft", [head(), MTP(), Standalone(TARGET), Union(head(), Ngram())])
def test_a_model_that_never_accepted_anything_is_reported(draft: Draft, caplog: pytest.LogCaptureFixture) -> None:
    """After a restart or new weights there is no better window to compare with."""
    monitor = AcceptanceMonitor(draft)
    with caplog.at_level(logging.WARNING, LOGGER):
        feed(monitor, 0.001)
    assert monitor.read().collapsed
    assert (
        caplog.messages[0].count("best earlier") == 0 and type(draft).__name__.replace("Union", "Ngram") in caplog.text
    )


def test_windows_are_long_whatever_updates_bring() -> None:
    monitor = AcceptanceMonitor(head())
    for _ in range(module.WINDOW_ROUNDS - 1):
        monitor.add(0, 1, 3, 0)
    assert monitor.read().recent is None
    monitor.add(0, 5, 0, 0)  # rounds without drafts do not count
    assert monitor.read().recent is None
    monitor.add(0, 1, 3, 0)
    assert monitor.read().recent == (0.0, 0.0)
    for _ in range(module.WINDOW_ROUNDS):
        monitor.add(0, 1, 1, 1)
    assert monitor.read().recent == (0.0, 0.0)  # too few tokens
    for _ in range(module.WINDOW_TOKENS - module.WINDOW_ROUNDS):
        monitor.add(0, 1, 1, 1)
    assert monitor.read().recent == (1.0, 1.0)


def test_other_tree_sizes_and_weaker_texts_are_no_collapse() -> None:
    monitor = AcceptanceMonitor(head())
    for nodes, per_round in ((63, 5.0), (1, 0.45), (1, 0.8), (63, 1.0), (3, 0.6), (15, 0.51)):
        feed(monitor, per_round, nodes)
    got = monitor.read()
    assert not got.collapses and got.best == AcceptanceRates(5.0, round(5 * NUM_ROUNDS) / (63 * NUM_ROUNDS))


@pytest.mark.parametrize(
    "rates, collapses",
    [
        ([0.0, 0.0], 0),  # nothing repeats
        ([0.4, 0.0], 0),  # it never paid
        ([2.0, 0.02], 0),  # the prompts changed
        ([2.0, 0.0], 1),
    ],
)
def test_ngrams_collapse_only_from_high_to_practically_zero(
    rates: list[float], collapses: int, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = AcceptanceMonitor(Ngram())
    with caplog.at_level(logging.WARNING, LOGGER):
        for per_round in rates:
            feed(monitor, per_round, nodes=7)
    assert monitor.read().collapses == collapses == len(caplog.records)
    assert ("whether the prompts have changed" in caplog.text) == bool(collapses)


def test_new_weights_start_over_without_the_counts_of_running_requests() -> None:
    monitor = AcceptanceMonitor(head())
    feed(monitor, 2.0)
    monitor.forget([7])
    assert monitor.read().best is None
    feed(monitor, 2.0, request_id=7)
    assert monitor.read().recent is None
    feed(monitor, 0.15, request_id=7)
    got = monitor.read()
    assert not got.collapses and got.best is not None and got.best.per_round == pytest.approx(0.15, abs=1e-4)


class Breakable(Draft):
    """Drafts the tokens that followed in a known text, until it is broken: then a token that the texts do not have."""

    def __init__(self, following: dict[int, int]) -> None:
        self._following = following

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=3, accept_width=3)

    def open(self, context: Any) -> None:
        self.following = torch.full([context.vocab_size], 0, dtype=torch.int32, device=context.device)
        for before, after in self._following.items():
            self.following[before] = after
        self.sound = self.following.clone()

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        first = self.following[self.state.root_tokens[slots]]
        tokens = torch.stack([first, self.following[first]], 1)
        parents = torch.tensor([-1, 0], dtype=torch.int32, device=tokens.device).repeat(len(slots), 1)
        scores = torch.tensor([-0.5, -1.0], device=tokens.device).repeat(len(slots), 1)
        return Proposal(Candidates(tokens, parents, scores))


@pytest.mark.parametrize("stream", [False, True])
def test_a_draft_that_breaks_in_a_running_engine_raises_the_alarm_until_it_is_mended(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WINDOW_ROUNDS", 16)
    monkeypatch.setattr(module, "WINDOW_TOKENS", 32)
    prompts = [prompt[:40] for prompt in held_out("repeat")[:4]]
    options: dict[str, Any] = {"max_len": 128, "num_slots": 2, "dtype": torch.float32, "device": "cpu"}
    with closing(Engine(TARGET, **options)) as plain:
        texts = [output.tokens for output in plain.generate(prompts, SamplingParams(40))]
    draft = Breakable({a: b for text in texts for a, b in pairwise(text)})
    with closing(Engine(TARGET, draft=draft, adaptive=False, **options)) as engine:

        def run() -> None:
            got = [engine.submit(prompt, SamplingParams(40), stream=stream) for prompt in prompts]
            assert [request.result().tokens for request in got] == texts

        with caplog.at_level(logging.WARNING, LOGGER):
            run()
            got = engine.stats().acceptance
            assert got.best is not None and got.best.per_round > 0.5 and not caplog.records
            (wrong,) = sorted(set(range(100)) - {token for text in texts for token in text})[:1]
            draft.following.fill_(wrong)
            run()
            run()
            got = engine.stats().acceptance
            assert got.collapsed and got.collapses == 1 and got.recent == (0.0, 0.0)
            (warning,) = caplog.messages
            assert "Breakable has collapsed" in warning
            draft.following.copy_(draft.sound)
            run()
            run()
            assert not engine.stats().acceptance.collapsed and "recovered" in caplog.messages[-1]
            assert (engine.stats() - engine.stats()).acceptance.collapses == 1 and len(caplog.records) == 2
        engine.update_weights()
        assert engine.stats().acceptance.best is None
