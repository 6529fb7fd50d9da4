"""Round times of the simulated budget."""

from __future__ import annotations

from specdec_kernels.engine.config import budget_levels

BATCHES = (1, 8, 16, 64, 256)
WIDTH = 6


def us_of(batch: int, rows: int) -> float:
    """Return round times of h200-round-code.json within 10 %: plain, chain of 6 and tree of 32, batch 1 to 64."""
    drafting = 0 if rows == batch else 230 * min(WIDTH - 1, rows / batch) + 20
    return 4200 + drafting + max(27 * batch, 24 * rows - 1000)


ROWS = [budget_levels(batch, 48) for batch in BATCHES]
US = [[us_of(batch, rows) for rows in each] for batch, each in zip(BATCHES, ROWS, strict=True)]
