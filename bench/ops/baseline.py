"""Comparison of a run with an earlier one: what became slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One size in both runs: tokens per second of `round`, host time of calls, else the median time.

    A size that both runs also timed between other kernels has a second change, in "us between others".
    """

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
            before, now = measured(other), measured(line)
            if same_size(line, other) and (units := [unit for unit in now if unit in before]):
                found += [Change(line["op"], line["params"], unit, before[unit], now[unit]) for unit in units]
                break
    return found


def same_size(a: Line, b: Line) -> bool:
    """Return whether two results are of one op and size."""
    if a["op"] != b["op"]:
        return False
    both = a["params"].keys() & b["params"].keys()
    return all(a["params"][name] == b["params"][name] for name in both)


def measured(line: Line) -> dict[str, float]:
    """Return the values of a result by unit; none if it was not timed."""
    if line["op"] == "round":
        values = {"tokens/s": line.get("facts", {}).get("tokens_per_second")}
    elif "call" in line["params"]:
        values = {"us": line["host_us"]}
    else:
        values = {"us": line["time_us"], "us between others": line.get("between_us")}
    return {unit: value for unit, value in values.items() if value}
