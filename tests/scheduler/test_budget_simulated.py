"""The budget against devices that are only numbers: measured costs of an H200, drafts of several kinds, any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_kernels._C import Budget, BudgetConstants, RoundCosts
from support.simulated_budget import BATCHES, ROWS, US, WIDTH, us_of

# Of a request that has x rows: what its drafts gain is most * (1 - (1 + x - 1) ** -power).
DRAFTS = {"chat": (2.6, 0.55), "code": (4.0, 0.65), "math": (4.6, 0.75), "wrong": (0.0, 1.0)}


def gain(kind: str, x: float) -> float:
    most, power = DRAFTS[kind]
    return float(min(most * (1 - x**-power), x - 1))


class Machine:
    """Rounds of one batch size on a clock of its own. Scores promise `lie` times the gain, and at least `boast`."""

    def __init__(
        self,
        size: int,
        cost: Callable[[int, int], float],
        lie: float = 1.0,
        boast: float = 0.0,
        constants: BudgetConstants | None = None,
    ) -> None:
        self.size, self.cost, self.lie, self.boast = size, cost, lie, boast
        self.budget = Budget(RoundCosts(BATCHES, ROWS, US), WIDTH, constants=constants or BudgetConstants())
        self.rng, self.last = random.Random(11), 0
        self.us = self.tokens = self.expected = 0.0

    def run(self, kind: str, rounds: int, kv_rows: float = 0) -> list[int]:
        batch, rows = BATCHES[self.size], ROWS[self.size]
        chosen = []
        self.us = self.tokens = self.expected = 0
        for _ in range(rounds):
            level = self.budget.next_level(self.size, batch, kv_rows)
            self.expected += batch * self.budget.expected_tokens(self.size, level, batch)
            gains = [gain(kind, r / batch) for r in rows]
            # Every accepted draft is a coin: how far off the mean over the batch is.
            noise = self.rng.gauss(0, 1.2 / batch**0.5)
            true = [batch * max(g * (1 + noise / 2), 0.0) for g in gains]
            scores = [batch * max(self.lie * g, self.boast * (1 - batch / r)) for g, r in zip(gains, rows, strict=True)]
            us = self.cost(batch, rows[level]) * self.rng.uniform(0.99, 1.01)
            self.budget.update_cost(self.size, level, batch, kv_rows, us)
            shown = min(level, self.last) + 1
            self.budget.update_gain(self.size, level, batch, scores[:shown], true[:shown])
            self.last = level
            self.us += us
            self.tokens += batch * (1 + gains[level])
            chosen.append(level)
        return chosen

    def fixed(self, kind: str, level: int) -> float:
        """Tokens a microsecond where all rounds are of one level."""
        batch, rows = BATCHES[self.size], ROWS[self.size]
        return batch * (1 + gain(kind, rows[level] / batch)) / self.cost(batch, rows[level])

    def of_best(self, kind: str) -> float:
        return self.tokens / self.us / max(self.fixed(kind, level) for level in range(len(ROWS[self.size])))


sizes = pytest.mark.parametrize("size", range(len(BATCHES)))


@sizes
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("lie", [1.0, 1.6])
def test_budget_is_close_to_best_fixed_level(size: int, kind: str, lie: float) -> None:
    """Also where scores promise more than comes true."""
    machine = Machine(size, us_of, lie, boast=1.0 if kind == "wrong" else 0.0)
    machine.run(kind, 400)
    machine.run(kind, 2000)
    assert machine.of_best(kind) > 0.98
    assert machine.tokens / machine.us > 0.99 * machine.fixed(kind, 0)


@sizes
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("lie", [0.7, 1.0, 1.6])
def test_budget_expectation_matches_outcome(size: int, kind: str, lie: float) -> None:
    machine = Machine(size, us_of, lie, boast=1.0 if kind == "wrong" else 0.0)
    machine.run(kind, 400)
    machine.run(kind, 1000)
    assert machine.expected == pytest.approx(machine.tokens, rel=0.03)


@sizes
def test_budget_follows_changing_text(size: int) -> None:
    machine = Machine(size, us_of, boast=1.0)
    for kind in ("math", "wrong", "code", "wrong", "chat"):
        machine.run(kind, 1000)
        machine.run(kind, 1500)
        assert machine.of_best(kind) > 0.98, kind


@sizes
@pytest.mark.parametrize("kind", ["code", "wrong"])
def test_budget_measures_prefix_cost(size: int, kind: str) -> None:
    """Attention over them is in no measured cost: a rate of KV rows, and a share that grows with rows."""
    kv = 0.0

    def cost(batch: int, rows: int) -> float:
        return us_of(batch, rows) + kv * (0.04 + 0.001 * (rows / batch - 1))

    machine = Machine(size, cost, boast=1.0 if kind == "wrong" else 0.0)
    for each in (500, 8000, 500):
        kv = each * BATCHES[size]
        machine.run(kind, 1500, kv)
        machine.run(kind, 1500, kv)
        assert machine.of_best(kind) > 0.98, each


@sizes
def test_texts_that_grow_and_cost_nothing(size: int) -> None:
    """A rate of KV that cannot fall below none leaves what all rounds take as it is."""
    machine, batch = Machine(size, us_of, boast=1.0), BATCHES[size]
    machine.run("wrong", 400, 32 * batch)
    us = sum(machine.run("wrong", 1, kv * batch) and machine.us for _ in range(3) for kv in range(32, 232))
    assert 600 * batch / us > 0.98 * machine.fixed("wrong", 0)


def test_what_any_requests_cost_is_no_rate_of_their_kv() -> None:
    """Rounds of texts of no length wait for no attention: with short ones the same is missing at every batch size."""
    machine = Machine(0, lambda batch, rows: us_of(batch, rows) + 300 + 20 * rows / batch)
    machine.run("code", 300, 321)
    for machine.size in (0, 1, 2, 1):
        machine.run("code", 100, 400 * BATCHES[machine.size])
        assert machine.of_best("code") > 0.95


@sizes
def test_experts_that_are_measured_too_cheap(size: int) -> None:
    """Rounds without requests touch few experts: with rows all are touched, and every round costs far more."""

    def cost(batch: int, rows: int) -> float:
        return us_of(batch, rows) * (1 + 5 * (1 - (1 - 8 / 128) ** rows))

    machine = Machine(size, cost)
    machine.run("code", 3000, 300 * BATCHES[size])
    machine.run("code", 3000, 300 * BATCHES[size])
    assert machine.of_best("code") > 0.97


def test_what_was_learnt_is_kept_in_another_batch() -> None:
    """The gain is a curve over rows per request: a growing batch starts with what a small one has learned."""
    machine = Machine(2, us_of)
    machine.run("chat", 1000)
    machine.size = 3
    machine.run("chat", 20)
    assert machine.of_best("chat") > 0.96


def test_budget_is_deterministic() -> None:
    assert Machine(3, us_of).run("chat", 500) == Machine(3, us_of).run("chat", 500)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_budget_with_alternating_batch_sizes(period: int) -> None:
    """As rounds tell it: nothing of levels above the round's or the one's before. A trial goes on in another size."""
    budget, last = Machine(2, us_of).budget, 0

    def run(kind: str, rounds: int) -> tuple[list[tuple[int, int]], float, float]:
        nonlocal last
        chosen, spent, plain = [], 0.0, 0.0
        for number in range(rounds):
            size = 2 + number // period % 2
            batch, rows = BATCHES[size], ROWS[size]
            level = budget.next_level(size, batch, 0)
            shown = [batch * gain(kind, r / batch) for r in rows[: min(level, last) + 1]]
            budget.update_cost(size, level, batch, 0, us_of(batch, rows[level]))
            budget.update_gain(size, level, batch, shown, shown)
            last = level
            chosen.append((size, level))
            spent += us_of(batch, rows[level])
            plain += us_of(batch, batch)
        return chosen, spent, plain

    run("wrong", 1500)
    _, spent, plain = run("wrong", 3000)
    assert plain < spent < 1.02 * plain
    run("code", 3000)
    chosen = run("code", 200)[0]
    assert chosen.count((2, 4)) + chosen.count((3, 3)) > 180, chosen  # the best of each


def test_a_clock_that_stands_still_says_nothing() -> None:
    budget = Machine(3, us_of).budget
    for us in (0.0, -5.0, float("nan")):
        for _ in range(20_000):
            budget.update_cost(3, 2, BATCHES[3], 1000, us)
    other = Machine(3, us_of).budget
    for level in range(len(ROWS[3])):
        for each in (budget, other):
            each.update_cost(3, level, BATCHES[3], 5000, us_of(BATCHES[3], ROWS[3][level]))
    assert [budget.next_level(3, BATCHES[3], 5000) for _ in range(300)] == [
        other.next_level(3, BATCHES[3], 5000) for _ in range(300)
    ]


@pytest.mark.parametrize("requests", [1, 5, 8])
def test_a_row_for_each_of_the_batch_is_plain_decoding(requests: int) -> None:
    """The row of an absent request is no draft; those who are present share its rows."""
    budget = Machine(1, us_of).budget
    assert budget.expected_tokens(1, 0, requests) == 1
    assert budget.expected_tokens(1, 1, requests) == 1 + min(ROWS[1][1] / requests - 1, WIDTH - 1)


@sizes
def test_budget_corrects_gains_above_level(size: int) -> None:
    """Check levels above a round's own, whose drafts it scored: predicted gains count, corrected as levels below."""
    budget, batch, rows = Machine(size, us_of).budget, BATCHES[size], ROWS[size]
    gains = [batch * gain("code", r / batch) for r in rows]
    below = len(rows) // 2
    for _ in range(200):
        budget.update_gain(size, below, batch, gains, [0.5 * g for g in gains[: below + 1]])
    for level in range(len(rows)):
        assert budget.expected_tokens(size, level, batch) == pytest.approx(1 + 0.5 * gains[level] / batch, rel=0.07)


def test_fewer_requests_than_places_say_nothing_of_nodes_that_were_not_drafted() -> None:
    """They share the rows of a level, which has then more of them for each than nodes are drafted."""
    drafted = [[rows // batch + 1 for rows in each] for batch, each in zip(BATCHES, ROWS, strict=True)]
    budget = Budget(RoundCosts(BATCHES, ROWS, US), WIDTH, drafted=drafted)
    rows, top, level = ROWS[1], len(ROWS[1]) - 1, 2
    for _ in range(200):
        gains = [8 * gain("code", r / 8) for r in rows]
        budget.update_gain(1, top, 8, gains, gains)
    for _ in range(400):
        gains = [0, *(3 * gain("code", min(r / 3, drafted[1][level])) for r in rows[1 : level + 2])]
        budget.update_gain(1, level, 3, gains, gains[: level + 1])
    assert budget.expected_tokens(1, top, 8) == pytest.approx(1 + gain("code", rows[top] / 8), rel=0.03)
    assert budget.expected_tokens(1, level, 3) == pytest.approx(1 + gain("code", drafted[1][level]), rel=0.03)


def test_what_a_round_shows_is_as_much_as_it_is_expected() -> None:
    budget = Machine(1, us_of).budget
    for predicted, observed in (([], []), ([1.0], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match=r"^update_gain: observed \(how many\) is"):
            budget.update_gain(1, 0, 8, predicted, observed)


# --- golden figures

GOLDEN = Path(__file__).with_name("budget_golden.txt")
CONSTANTS = [name for name in vars(BudgetConstants) if not name.startswith("_")]


def figures(constants: BudgetConstants) -> str:
    """Return the least and mean throughput over batch sizes.

    It is relative to plain decoding with wrong drafts, and to the best level for a changing text.
    """
    plain, best = [], []
    for size in range(len(BATCHES)):
        machine = Machine(size, us_of, boast=1.0, constants=constants)
        machine.run("wrong", 1000)
        plain.append(machine.tokens / machine.us / machine.fixed("wrong", 0))
        machine = Machine(size, us_of, constants=constants)
        for kind in ("chat", "wrong", "code"):
            machine.run(kind, 300)
            best.append(machine.of_best(kind))
    return " ".join(f"{value:.3f}" for value in (min(plain), sum(plain) / len(plain), min(best), sum(best) / len(best)))


def golden() -> str:
    """Return the figures with the constants, and with each of them halved and doubled."""
    lines = [
        "# Throughput relative to plain decoding with wrong drafts (least, mean over batch sizes), and to the best level",
        "# while the text changes (least, mean): with the budget's constants, and with each one halved and doubled.",
        f"{'as they are':32} {figures(BudgetConstants())}",
    ]
    for name in CONSTANTS:
        for factor in (0.5, 2.0):
            constants = BudgetConstants()
            value = getattr(constants, name)
            changed = 1 + (value - 1) * factor if name == "switch_margin" else type(value)(value * factor)
            setattr(constants, name, changed)
            lines.append(f"{f'{name} * {factor:g}':32} {figures(constants)}")
    return "\n".join(lines) + "\n"


def test_budget_golden_figures() -> None:
    """To record new figures: PYTHONPATH=tests python tests/scheduler/test_budget_simulated.py."""
    assert golden() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(golden())
