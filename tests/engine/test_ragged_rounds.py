"""Rounds of packed rows: the best nodes of the whole batch, whichever requests they are of."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.engine import Eagle3, Engine, Ngram, SamplingParams
from specdec_kernels.engine.device.round import Drafted, most_nodes
from specdec_kernels.engine.drafts import Needs
from specdec_kernels.tiny import tiny_model
from support.budget_engines import (
    DRAFTS,
    NEW_TOKENS,
    every_draft,
    expect_plain_texts,
    make_engine,
    plain_texts,
    prompts,
)
from support.observed_rounds import wrap_launch, wrap_method
from support.tiny_checkpoint import Comparison, reference_model


@every_draft
def test_round_rows_are_shared_by_requests(name: str, tmp_path: Path) -> None:
    """No more than the budget, some requests more than others, and the texts are those of the target."""
    engine = make_engine(DRAFTS[name](tmp_path), torch.device("cpu"), adaptive=True)
    round = engine.core.executor.round
    wrap_launch(engine, lambda launch, batch, rows, most: launch(batch, 4 * batch if rows > 0 else rows, most))
    seen: list[list[int]] = []
    commit = round.commit

    def noted(drafted: Drafted) -> Any:
        result, num_rows = commit(drafted), len(drafted.hidden)
        counts = result.num_nodes.tolist()
        assert sum(counts) <= num_rows and max(counts) <= most_nodes(len(counts), num_rows, engine.config.needs)
        seen.append(counts)
        return result

    round.commit = noted  # type: ignore[method-assign]
    expect_plain_texts(engine)
    assert any(max(counts) > 4 for counts in seen) != engine.draft.sampled


def test_large_batch_drafts_fewer_paths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each path costs, a tree of n nodes is drafted by n / 4 of them, or is one; the texts are the target's."""
    monkeypatch.setattr("specdec_kernels.engine.drafts.model.TILE_ROWS", 1)
    draft = Eagle3(tiny_model("eagle3"), topk=8, num_nodes=6)
    engine = make_engine(draft, device, adaptive=False)
    assert [draft.num_branches(4, nodes) for nodes in (2, 6, 7, 12, 32)] == [1, 1, 2, 3, 8]
    outputs = engine.generate(prompts(), SamplingParams(NEW_TOKENS))
    comparison = Comparison(reference_model())
    for prompt, output, plain in zip(prompts(), outputs, plain_texts(), strict=True):
        comparison.check(prompt, output.tokens, plain)
    assert sum(output.stats.rounds for output in outputs) < 0.7 * sum(len(output.tokens) for output in outputs)


def test_max_nodes_of_one_request() -> None:
    """Where every level of a tree is a pass, rounds of few rows have few levels; where it costs nothing, they need not."""
    rows = (64, 96, 128, 192, 256, 384, 64 * 48)
    levels = Needs(num_nodes=48, accept_width=6, num_steps=5)
    assert [most_nodes(64, each, levels) for each in rows] == [1, 2, 3, 4, 8, 12, 48]
    assert [most_nodes(64, each, replace(levels, num_steps=3)) for each in rows] == [1, 2, 4, 6, 8, 12, 48]
    assert [most_nodes(64, each, replace(levels, num_steps=0)) for each in rows] == [1, 3, 4, 6, 8, 12, 48]
    assert [most_nodes(1, each, levels) for each in (1, 2, 3, 4, 5, 6, 48)] == [1, 2, 3, 4, 5, 12, 48]
    assert most_nodes(4, 4 * 6, replace(levels, num_nodes=6)) == 6  # a chain of all steps, where nothing is chosen
    assert [most_nodes(64, each, levels, equal=True) for each in rows] == [1, 1, 2, 3, 4, 6, 48]


@pytest.mark.parametrize(("rows", "steps"), [(6, 1), (12, 3), (16, 5)])
def test_small_budget_drafts_fewer_levels(rows: int, steps: int) -> None:
    """The first is drafted already when a round begins. Texts are those of the target."""
    draft = Eagle3(tiny_model("eagle3"), num_steps=5, topk=2, num_nodes=16)
    engine = make_engine(draft, torch.device("cpu"), adaptive=True, num_slots=4, batch_sizes=[4])
    step, passes = draft.step, []

    def launched(launch: Callable[..., None], batch: int, num_rows: int, most: int) -> None:
        passes.append(0)
        launch(batch, rows if num_rows > 0 else num_rows, most)

    def stepped(*given: Any) -> Any:
        passes[-1] += 1
        return step(*given)

    wrap_launch(engine, launched)
    draft.step = stepped  # type: ignore[method-assign]
    expect_plain_texts(engine)
    assert set(passes) - {0} == {steps - 1} - {0} and len(passes) > 10


def test_idle_slot_gets_no_rows() -> None:
    engine = make_engine(Eagle3(tiny_model("eagle3")), torch.device("cpu"), adaptive=True)
    state, round = engine.state, engine.core.executor.round
    slots = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    scores = torch.zeros(4, 16)
    state.finish_reasons[2], state.status[1] = int(sd.FinishReason.STOP), int(sd.Status.STALLED)
    shares = round.allocate_shares(scores, slots, 16)
    assert shares.num_nodes.tolist() == [0, 16, 0, 0] and shares.cu_seqlens.tolist() == [0, 0, 16, 16, 16]


@pytest.mark.parametrize("adaptive", [False, True])
def test_request_without_speculation_gets_no_drafts(adaptive: bool) -> None:
    """Beside requests that do, whose nodes they leave to them; the texts are the same."""
    engine = make_engine(Eagle3(tiny_model("eagle3")), torch.device("cpu"), adaptive=adaptive)
    wanted: list[Literal["on", "off"] | int] = ["on", "off", 1, 3]
    kinds = [SamplingParams(NEW_TOKENS, speculation=wanted[i % 4]) for i in range(len(prompts()))]
    comparison = Comparison(reference_model())
    for i, (prompt, output) in enumerate(zip(prompts(), engine.generate(prompts(), kinds), strict=True)):
        comparison.check(prompt, output.tokens, plain_texts()[i])
        most = {"on": 48, "off": 1}.get(str(wanted[i % 4]), 3 if i % 4 == 3 else 1)
        assert output.stats.drafted <= (most - 1) * output.stats.rounds
        assert adaptive or (output.stats.drafted > 0) == (most > 1)


@pytest.mark.parametrize("speculation", ["some", 0, -1, True, 1.5])
def test_speculation_values_are_validated(speculation: Any) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(speculation=speculation)
    assert str(error.value) == (
        f"SamplingParams: speculation is {speculation}, expected 'on', 'off' or a number of nodes from 1 on"
    )


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("target"), draft=Ngram(num_nodes=256), num_slots=257, device="cpu")
    assert str(error.value) == (
        "Engine: num_slots is 257, expected at most 256 (trees of 256 nodes; a round has 65536 at most)"
    )


@pytest.mark.parametrize("name", ["eagle3-tree", "eagle3+ngram"])
def test_rounds_of_fixed_costs_do_not_depend_on_time(name: str, tmp_path: Path) -> None:
    """The sizes of adaptive rounds in tests, which cost what conftest.py says, are the same on a slow machine."""
    sizes = []
    for delay in (0, 0.004):
        engine = make_engine(DRAFTS[name](tmp_path), torch.device("cpu"), adaptive=True)
        wrap_method(engine.core.executor.round, "run_target", partial(late, delay))
        expect_plain_texts(engine)
        sizes.append(engine.stats().rounds_by_nodes)
        engine.close()
    assert sizes[0] == sizes[1] and len(sizes[0]) > 4


def late(delay: float, call: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(random.random() * delay)
    return call(*arguments)
