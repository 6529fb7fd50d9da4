"""The alarm for a draft whose tokens are not accepted any more, from the counts that requests deliver anyway."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .drafts import Draft
from .drafts.calibrated import CalibratedDraft
from .drafts.composition import leaves

logger = logging.getLogger(__name__)

# A window ends with the update that fills both: rounds of a request, and tokens drafted for them.
WINDOW_ROUNDS, WINDOW_TOKENS = 4096, 8192
# A draft with a model has collapsed below this share of its best window. Other tasks and sampling change the acceptance
# of a sound model by a few times, not by ten.
COLLAPSED_SHARE = 0.1
# Recovery takes this many times the rates of a collapse, so that the alarm does not flicker.
RECOVERY = 2.0
# A draft without a model (n-grams) has to reach this many accepted tokens per round before it can collapse.
HIGH = 0.5


class AcceptanceRates(NamedTuple):
    """Means over a window.

    Attributes:
        per_round: accepted draft tokens per round of a request.
        per_token: accepted draft tokens per draft token that was verified.
    """

    per_round: float
    per_token: float

    def times(self, factor: float) -> AcceptanceRates:
        """Return both rates times a factor."""
        return AcceptanceRates(self.per_round * factor, self.per_token * factor)

    def is_below(self, limit: AcceptanceRates) -> bool:
        """Return whether both rates are below those of `limit`.

        One alone shows no collapse: smaller trees have fewer accepted tokens per round, but more per draft token, and
        larger trees the reverse.
        """
        return self.per_round < limit.per_round and self.per_token < limit.per_token


# Below these, practically nothing is accepted, whatever the texts and the trees: trees of 64 nodes with 0.06 accepted
# tokens per round have 0.001 per draft token.
PRACTICALLY_ZERO = AcceptanceRates(0.01, 0.001)
ANYTHING = AcceptanceRates(0.0, 0.0)  # nothing is below it


@dataclass(frozen=True)
class DraftAcceptance:
    """The share of an engine's drafts that is accepted, over long windows, since its start or its last new weights.

    Attributes:
        collapsed: the draft's acceptance has collapsed and not recovered.
        collapses: collapses since the engine was made, new weights included.
        recent: rates of the last full window; None before the first one is full.
        best: those of the window with most accepted tokens per round.
    """

    collapsed: bool
    collapses: int
    recent: AcceptanceRates | None
    best: AcceptanceRates | None


class AcceptanceMonitor:
    """Compares windows of rounds with the best one before, and logs a warning when acceptance collapses or recovers.

    Windows are counted in rounds and draft tokens, not in time. Only counts of requests enter: rounds that measure
    costs have none. A combined draft is judged as a whole, since rounds do not count whose node was accepted.
    """

    def __init__(self, draft: Draft) -> None:
        self._name, self._has_model = name_of(draft), any(isinstance(part, CalibratedDraft) for part in leaves(draft))
        self._lock = threading.Lock()
        self._mixed: set[int] = set()  # requests whose next counts include rounds with earlier weights
        self._rounds = self._drafted = self._accepted = 0
        self._recent: AcceptanceRates | None = None
        self._best: AcceptanceRates | None = None
        self._collapsed, self._collapses = False, 0

    def add(self, request_id: int, rounds: int, drafted: int, accepted: int) -> None:
        """Add what an update adds to the counts of a request. Updates without draft tokens do not count."""
        if drafted <= 0:
            return
        with self._lock:
            if request_id in self._mixed:
                self._mixed.remove(request_id)
                return
            self._rounds += rounds
            self._drafted += drafted
            self._accepted += accepted
            if self._rounds >= WINDOW_ROUNDS and self._drafted >= WINDOW_TOKENS:
                self._end_window()

    def forget(self, running: Iterable[int]) -> None:
        """Start over with new weights. The next counts of `running` requests are dropped: they mix both."""
        with self._lock:
            self._mixed = set(running)
            self._rounds = self._drafted = self._accepted = 0
            self._recent = self._best = None
            self._collapsed = False

    def read(self) -> DraftAcceptance:
        """Return the state, from any thread."""
        with self._lock:
            return DraftAcceptance(self._collapsed, self._collapses, self._recent, self._best)

    def _limit(self) -> AcceptanceRates:
        """Return the rates below which the draft has collapsed."""
        if not self._has_model:  # where texts repeat nothing, nothing is accepted of a sound draft
            return ANYTHING if self._best is None or self._best.per_round < HIGH else PRACTICALLY_ZERO
        if self._best is None:
            return PRACTICALLY_ZERO
        share = self._best.times(COLLAPSED_SHARE)
        return AcceptanceRates(*map(max, share, PRACTICALLY_ZERO))

    def _end_window(self) -> None:
        recent = AcceptanceRates(self._accepted / self._rounds, self._accepted / self._drafted)
        before, limit = self._best, self._limit()
        if not self._collapsed and recent.is_below(limit):
            self._collapsed = True
            self._collapses += 1
            earlier = "" if before is None else f"; the best earlier window had {text_of(before)}"
            logger.warning(
                "acceptance of the draft %s has collapsed: %s in the last %d rounds with %d draft tokens%s. Texts stay "
                "right, but drafting gains nothing. %s",
                self._name,
                text_of(recent),
                self._rounds,
                self._drafted,
                earlier,
                self._advice(),
            )
        elif self._collapsed and not recent.is_below(limit.times(RECOVERY)):
            self._collapsed = False
            logger.warning("acceptance of the draft %s has recovered: %s", self._name, text_of(recent))
        self._recent = recent
        if before is None or recent.per_round > before.per_round:
            self._best = recent
        self._rounds = self._drafted = self._accepted = 0

    def _advice(self) -> str:
        if self._has_model:
            return (
                "`specdec doctor` with this target and draft says what does not fit; look also at what has changed "
                "(weights, adapters, the chat template)."
            )
        return (
            "A draft without a model finds nothing in texts that repeat nothing: look first at whether the prompts "
            "have changed. `specdec doctor` checks drafts with a model."
        )


def name_of(draft: Draft) -> str:
    """Return the classes of a draft's parts, and the names of their models."""
    return " and ".join(
        f"{type(part).__name__} ({part.model_name})" if isinstance(part, CalibratedDraft) else type(part).__name__
        for part in leaves(draft)
    )


def text_of(rates: AcceptanceRates) -> str:
    """Return rates in words."""
    return f"{rates.per_round:.3g} accepted tokens per round, {rates.per_token:.3g} per draft token"
