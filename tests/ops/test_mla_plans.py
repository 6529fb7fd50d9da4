"""Planning rules of mla_tree_attention, compared with a table of golden plans; runs without a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, cast

import pytest

import specdec_kernels as sd
from specdec_kernels import _C, MlaPlan

GPUS = {"H200": sd.H200, "A100": sd.A100, "L40S": sd.L40S}
TABLE = Path(__file__).with_name("mla_plans.txt").read_text().splitlines()
LINES = [line for line in TABLE if line and not line.startswith("#")]


def plan_of(line: str, plan: str | None = None) -> MlaPlan:
    gpu, *sizes, rows, options, _ = line.split()
    batch, q_rows, q_heads, max_kv_len = map(int, sizes)
    return sd.mla_plan(
        batch=batch,
        q_rows=q_rows,
        q_heads=q_heads,
        max_kv_len=max_kv_len,
        rows=cast(Literal["16-bit", "fp8", "656"], "16-bit" if rows == "float32" else rows),
        tensor_cores=rows != "float32",
        packed=options == "packed",
        listed=options == "listed",
        fixed_split=512 if options == "split512" else None,
        gpu=GPUS[gpu],
        plan=plan,
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()))
def test_mla_plan_matches_golden_table(line: str) -> None:
    *_, want = line.split()
    plan = plan_of(line)
    assert plan.name == want
    if "split512" not in line:
        assert plan_of(line, plan=want) == plan  # the name determines the plan


def test_mla_plans_choose_every_compiled_kernel() -> None:
    """If no line chooses a compiled kernel, the kernel is dead or the table lacks its use case."""
    assert {plan_of(line).variant for line in LINES} == set(_C.mla_variants())


@pytest.mark.parametrize("seed", range(5))
def test_mla_plan_sizes_are_consistent(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        shape = {
            "batch": draw.randint(1, draw.choice([4, 70, 500])),
            "q_rows": draw.randint(1, draw.choice([16, 300])),
            "q_heads": draw.choice([1, 16, 20, 40, 128]),
            "latent_dim": draw.choice([256, 512]),
            "max_kv_len": draw.randint(1, draw.choice([1500, 20_000, 200_000])),
            "rows": draw.choice(["16-bit", "fp8"]),
            "packed": draw.random() < 0.3,
            "listed": draw.random() < 0.3,
            "gpu": draw.choice(list(GPUS.values())),
        }
        plan = sd.mla_plan(**shape)
        assert sd.mla_plan(**shape, plan=plan.name) == plan
        assert plan.variant in _C.mla_variants()
        if plan.name != "plain" and plan.name.startswith("sm80"):
            assert 1 <= plan.splits <= 128
            assert (plan.workspace_bytes > 0) == (plan.splits > 1)
            # Half of the splits of a batch that fills the GPU would leave it half empty.
            assert plan.workspace_bytes <= 80 << 20
        if plan.name.startswith("sm90"):
            assert 1 <= plan.row_tiles <= 5 and 132 - 5 < plan.row_tiles * plan.workers <= 132
            part = 4 * plan.row_tiles * (64 * (512 + 2) + 4)
            assert plan.workspace_bytes == (0 if plan.whole_items else 2 * plan.workers * part)


@pytest.mark.parametrize(
    ("tiles", "row_tiles"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 3), (7, 4), (8, 4), (9, 3), (10, 5), (15, 5), (16, 4), (32, 4)],
)
def test_row_tiles_of_a_worker_on_hopper(tiles: int, row_tiles: int) -> None:
    """A worker has as many row tiles as leave it the fewest items, which are no more than with 4 row tiles."""
    for rows in (64 * tiles - 63, 64 * tiles):
        plan = sd.mla_plan(batch=16, q_rows=rows, q_heads=1, max_kv_len=32768, gpu=sd.H200)
        assert (plan.row_tiles, plan.workers) == (row_tiles, 132 // row_tiles)


SHAPE = {"batch": 1, "q_rows": 16, "q_heads": 16, "max_kv_len": 32768, "gpu": sd.A100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "sm80.mma.16.whole"}, "plan is sm80.mma.16.whole, expected options of splits<number>"),
        ({"plan": "sm80.mma.16.splits"}, "plan is sm80.mma.16.splits, expected options of splits<number>"),
        ({"plan": "sm80.mma.16.splits129"}, "plan is sm80.mma.16.splits129, expected 1 to 128 splits"),
        ({"plan": "sm80.mma.16", "tensor_cores": False}, "plan is sm80.mma.16, expected plain where tensor cores cannot be used"),
        ({"plan": "sm80.mma.64", "gpu": sd.L40S}, "plan is sm80.mma.64, expected a row tile of at most 16 on this device"),
        ({"plan": "sm80.mma.64.splits2", "fixed_split": 128}, "plan is sm80.mma.64.splits2, expected one without splits with fixed_split"),
        ({"plan": "sm90.wgmma.64"}, "plan is sm90.wgmma.64, expected plain or a plan of sm80 for this shape on this device"),
        ({"plan": "sm90.wgmma.64", "gpu": sd.H200, "latent_dim": 256}, "plan is sm90.wgmma.64, expected plain or a plan of sm80 for this shape on this device"),
        ({"plan": "sm90.wgmma.64.splits2", "gpu": sd.H200}, "plan is sm90.wgmma.64.splits2, expected option split or whole"),
        ({"plan": "sm90.wgmma.64.whole", "gpu": sd.H200, "packed": True}, "plan is sm90.wgmma.64.whole, expected split for packed rows, more than 320 rows of a request, or fixed_split"),
        ({"plan": "sm90.wgmma"}, "plan is sm90.wgmma, expected one of plain, sm80.mma.16, sm80.mma.32, sm80.mma.64, sm90.wgmma.64, optionally followed by options"),
        ({"batch": 0}, "batch is 0, expected 1 to 2147483647"),
        ({"rope_dim": 80}, "rope_dim is 80, expected 0 to 64"),
        ({"rows": "bf16"}, "rows is bf16, expected 16-bit, fp8 or 656"),
        ({"fixed_split": 100}, "fixed_split is 100, expected a positive multiple of 128"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.mla_plan(**SHAPE | change)
    assert str(error.value) == "mla_plan: " + message
