"""Rounds of packed rows: the best nodes of the whole batch, whichever requests they are of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.engine import Eagle3, Engine, Ngram
from specdec_kernels.engine.round import Round, most_nodes
from specdec_kernels.tiny import tiny_model
from test_budget import DRAFTS, every_draft, expect_plain_texts, make_engine


@every_draft
def test_requests_share_the_rows_of_a_round(name: str, tmp_path: Path) -> None:
    """No more than the budget, some requests more than others, and the texts are those of the target."""
    engine = make_engine(DRAFTS[name](tmp_path), torch.device("cpu"), adaptive=True)
    round, launch = engine._executor.round, engine._executor.launch
    engine._executor.launch = lambda batch, nodes, most: launch(batch, min(nodes, 4) and 4, most)
    seen: list[list[int]] = []
    run = round.run

    def noted(slots: Tensor, num_nodes: int) -> Any:
        result = run(slots, num_nodes)
        counts = result.num_nodes.tolist()
        assert sum(counts) <= len(counts) * num_nodes and max(counts) <= most_nodes(len(counts), num_nodes, 256)
        seen.append(counts)
        return result

    round.run = noted  # type: ignore[method-assign]
    expect_plain_texts(engine)
    assert any(max(counts) > 4 for counts in seen) != engine.draft.sampled


def test_who_is_idle_gets_its_root_alone() -> None:
    engine = make_engine(Eagle3(tiny_model("eagle3")), torch.device("cpu"), adaptive=True)
    state, round = engine.state, engine._executor.round
    slots = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    scores = torch.zeros(4, 16)
    state.finish_reasons[2], state.status[1] = int(sd.FinishReason.STOP), int(sd.Status.STALLED)
    shares = round._share(scores, slots, 4)
    assert shares.num_nodes.tolist() == [1, 14, 0, 1] and shares.cu_seqlens.tolist() == [0, 1, 15, 15, 16]


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_learns_what_lower_rungs_would_have_had(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, batch, most = (1, 2, 4, 8), 5, 16
    rungs = torch.tensor(nodes, dtype=torch.int32)
    round: Any = SimpleNamespace(nodes=nodes, _nodes=rungs, draft=SimpleNamespace(sampled=False))
    scores = -torch.rand(batch, most, generator=generator).cumsum(1)
    scores[:, 0] = 0
    shares = sd.share_nodes(scores, 8 * batch, rungs=rungs * batch)
    path = torch.stack([torch.arange(1, most), *torch.randint(1, most, (batch - 1, most - 1), generator=generator)])
    path = torch.where(path < shares.num_nodes[:, None], path, 0).to(torch.int32).sort(1).values
    shown = Round._by_rungs(round, path, scores, shares)
    for count in nodes:
        alone = sd.share_nodes(scores, count * batch).num_nodes.clamp(max=2 * count)
        assert torch.equal(shown < count, path < alone[:, None].clamp(min=1))


def test_more_nodes_than_can_be_compared_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("target"), draft=Ngram(num_nodes=256), num_slots=257, device="cpu")
    assert str(error.value) == (
        "Engine: num_slots is 257, expected at most 256 (trees of 256 nodes; a round has 65536 at most)"
    )
