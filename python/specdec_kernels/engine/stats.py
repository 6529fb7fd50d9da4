"""Counts and times of an engine's rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from .._C import RoundCosts, Scheduler
from .acceptance import DraftAcceptance
from .config import EngineConfig


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made; `b - a` gives those between two readings. Times are in seconds.

    Attributes:
        rounds: rounds read, first rounds of requests excluded. rows: requests in them.
        retractions: times that a request gave back its slot for lack of pages.
        prefix_hits: requests that started with pages of the prefix cache. cached_tokens: prompt tokens that these pages
            saved from prefill.
        snapshots_saved, snapshots_evicted, snapshots_restored: recurrent states of prefixes that the cache kept,
            dropped for lack of room, and used; 0 for models without such states.
        host_seconds: work of the scheduler's loop: launching rounds and command records, reading results, releasing
            slots. Excludes `wait_seconds` and `prefill_seconds`.
        wait_seconds: the loop's waits for the device.
        prefill_seconds: admitting requests and launching prefill. Includes waiting for the device's launch queue if a
            pass that is not captured fills it.
        emit_seconds: delivering results, in a thread next to the loop.
        device_seconds: rounds on the device, each from its first kernel to its last.
        following_seconds: the part of device_seconds of rounds that were launched while the round before was running,
            with nothing in between. gap_seconds: device idle time between such two rounds.
        rounds_by_nodes: rounds by nodes verified per request of the batch size. 1 is plain decoding; at 1.5 two
            requests share 3 nodes.
        costs: round times measured at startup; None for an engine that is not adaptive.
        acceptance: whether acceptance of the draft has collapsed, and its rates; of two readings, that of the later.
    """

    rounds: int
    rows: int
    retractions: int
    prefix_hits: int
    cached_tokens: int
    snapshots_saved: int
    snapshots_evicted: int
    snapshots_restored: int
    host_seconds: float
    wait_seconds: float
    prefill_seconds: float
    emit_seconds: float
    device_seconds: float
    following_seconds: float
    gap_seconds: float
    rounds_by_nodes: dict[float, int]
    costs: RoundCosts | None
    acceptance: DraftAcceptance

    def __sub__(self, before: EngineStats) -> EngineStats:
        rounds = {nodes: count - before.rounds_by_nodes[nodes] for nodes, count in self.rounds_by_nodes.items()}
        states = "rounds_by_nodes", "costs", "acceptance"
        counts = [field.name for field in fields(self) if field.name not in states]
        return EngineStats(
            **{name: getattr(self, name) - getattr(before, name) for name in counts},
            rounds_by_nodes=rounds,
            costs=self.costs,
            acceptance=self.acceptance,
        )

    def _per_round(self, seconds: float) -> float:
        return seconds / max(self.rounds, 1)

    @property
    def host_us(self) -> float:
        """Return the loop's own work per round, in microseconds."""
        return 1e6 * self._per_round(self.host_seconds)

    @property
    def wait_us(self) -> float:
        """Return the loop's wait for the device per round, in microseconds."""
        return 1e6 * self._per_round(self.wait_seconds)

    @property
    def emit_us(self) -> float:
        """Return the time to deliver the results of a round, in microseconds."""
        return 1e6 * self._per_round(self.emit_seconds)

    @property
    def device_ms(self) -> float:
        """Return the time of a round on the device, in milliseconds."""
        return 1e3 * self._per_round(self.device_seconds)

    @property
    def idle(self) -> float | None:
        """Return the fraction of time that the device idles between rounds; None if no round followed another."""
        busy = self.following_seconds
        return self.gap_seconds / (busy + self.gap_seconds) if busy else None


def read_stats(
    scheduler: Scheduler, config: EngineConfig, emit_seconds: float, acceptance: DraftAcceptance
) -> EngineStats:
    """Return the scheduler's counts. Device times are those of rounds whose results have been read."""
    times = scheduler.times
    return EngineStats(
        rounds=times.rounds,
        rows=times.rows,
        retractions=scheduler.num_retractions,
        prefix_hits=scheduler.num_prefix_hits,
        cached_tokens=scheduler.num_cached_tokens,
        snapshots_saved=scheduler.num_saved_snapshots,
        snapshots_evicted=scheduler.num_evicted_snapshots,
        snapshots_restored=scheduler.num_restored_snapshots,
        host_seconds=1e-9 * times.host,
        wait_seconds=1e-9 * times.wait,
        prefill_seconds=1e-9 * times.prefill,
        emit_seconds=emit_seconds,
        device_seconds=1e-9 * times.device,
        following_seconds=1e-9 * times.following,
        gap_seconds=1e-9 * times.gaps,
        rounds_by_nodes=rounds_by_nodes(scheduler, config),
        costs=scheduler.costs,
        acceptance=acceptance,
    )


def rounds_by_nodes(scheduler: Scheduler, config: EngineConfig) -> dict[float, int]:
    """Return the number of rounds by nodes per request of the batch size, increasing."""
    rounds: Counter[float] = Counter()
    for batch, rows, counts in zip(config.batch_sizes, config.all_rows, scheduler.rounds_by_rows, strict=True):
        rounds.update({each / batch: count for each, count in zip(rows, counts, strict=True)})
    return dict(sorted(rounds.items()))
