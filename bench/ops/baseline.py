"""Comparison of a run with an earlier one: what became slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One size in both runs: tokens per second of `round`, host time of calls, else the median time."""

    op: str
    params: dict[str, Any]
    unit: str
    before: float
    now: float

    @property
    def slower(self) -> float:
        """Relative increase of the time for the same work: 0.1 is ten percent, negative is faster."""
        ratio = self.before / self.now if self.unit == "tokens/s" else self.now / self.before
        return ratio - 1


def changes(run: Line, baseline: Line) -> list[Change]:
    """Return every size that both runs have timed. Parameters that only one of them has are ignored."""
    found = []
    for line in run["results"]:
        for other in baseline["results"]:
            pair = measured(line), measured(other)
            if same_size(line, other) and pair[0] is not None and pair[1] is not None:
                (unit, now), (_, before) = pair
                found.append(Change(line["op"], line["params"], unit, before, now))
                break
    return found


def same_size(a: Line, b: Line) -> bool:
    """Return whether two results are of one op and size."""
    if a["op"] != b["op"]:
        return False
    both = a["params"].keys() & b["params"].keys()
    return all(a["params"][name] == b["params"][name] for name in both)


def measured(line: Line) -> tuple[str, float] | None:
    """Return unit and value of a result, None if it was not timed."""
    if line["op"] == "round":
        value, unit = line.get("facts", {}).get("tokens_per_second"), "tokens/s"
    else:
        value, unit = line["host_us"] if "call" in line["params"] else line["time_us"], "us"
    return (unit, value) if value else None
