"""Record the chains that an engine's draft proposes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from specdec_kernels.engine import DraftBudget, Engine
from specdec_kernels.engine.drafts.proposal import scored_tree_of


def record_chains(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Return a list that each round extends with each request's text length and the chain after it."""
    drafted: list[tuple[int, list[int]]] = []
    propose = engine.draft.propose

    def keep(slots: Tensor, budget: DraftBudget) -> Any:
        proposal = propose(slots, budget)
        tree = scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state).tree
        if budget.num_nodes > 1:
            drafted.extend(zip(tree.positions[:, 0].tolist(), tree.tokens[:, 1:].tolist(), strict=True))
        return proposal

    monkeypatch.setattr(engine.draft, "propose", keep)
    return drafted
