"""A run beside an earlier one: what became slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """One size in both runs: of `round` tokens a second, of calls the host's time, else the median time."""

    op: str
    params: dict[str, Any]
    unit: str
    before: float
    now: float

    @property
    def slower(self) -> float:
        """How much longer the same work takes now: 0.1 is ten percent, negative is faster."""
        ratio = self.before / self.now if self.unit == "tokens/s" else self.now / self.before
        return ratio - 1


def changes(run: Line, baseline: Line) -> list[Change]:
    """Every size that both runs have timed. Parameters that only one of them knows do not tell sizes apart."""
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
    if a["op"] != b["op"]:
        return False
    both = a["params"].keys() & b["params"].keys()
    return all(a["params"][name] == b["params"][name] for name in both)


def measured(line: Line) -> tuple[str, float] | None:
    """What counts of a result, and its unit; None where it was not timed."""
    if line["op"] == "round":
        value, unit = line.get("facts", {}).get("tokens_per_second"), "tokens/s"
    else:
        value, unit = line["host_us"] if "call" in line["params"] else line["time_us"], "us"
    return (unit, value) if value else None
