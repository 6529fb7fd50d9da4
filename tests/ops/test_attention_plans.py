"""Planning rules of tree_attention, compared with a table of golden plans; runs without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import specdec_kernels as sd
from specdec_kernels import _C, AttentionPlan, Gpu

GPUS = {"H200": sd.H200, "A100": sd.A100, "L40S": sd.L40S}
TABLE = Path(__file__).with_name("attention_plans.txt").read_text().splitlines()
LINES = [line for line in TABLE if line and not line.startswith("#")]


def plan_of(line: str, plan: str | None = None) -> AttentionPlan:
    gpu, *sizes, pools, options, _ = line.split()
    batch, q_rows, q_heads, kv_heads, head_dim, max_kv_len = map(int, sizes)
    return sd.attention_plan(
        batch=batch,
        q_rows=q_rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_kv_len=max_kv_len,
        fp8=pools == "fp8",
        tensor_cores=pools != "float32",
        packed=options == "packed",
        fixed_split=128 if options == "split128" else None,
        page_size=1 if options == "page1" else 16,
        gpu=GPUS[gpu],
        plan=plan,
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()))
def test_attention_plan_matches_golden_table(line: str) -> None:
    *_, want = line.split()
    plan = plan_of(line)
    assert plan.name == want
    assert plan_of(line, plan=want) == plan  # the name determines the plan


def test_attention_plans_choose_every_compiled_kernel() -> None:
    """If no line chooses a compiled kernel, the kernel is dead or the table lacks its use case."""
    assert {plan_of(line).variant for line in LINES} == set(_C.attention_variants())


def random_shape(draw: random.Random) -> dict[str, object]:
    kv_heads = draw.choice([1, 2, 4, 7, 8, 20])
    packed, fixed_split = draw.random() < 0.3, draw.choice([None, None, None, 128, 4096])
    return {
        "batch": draw.randint(1, draw.choice([4, 70, 500])),
        "q_rows": draw.randint(1, draw.choice([16, 300])),
        "q_heads": kv_heads * draw.choice([1, 2, 4, 7, 8]),
        "kv_heads": kv_heads,
        "head_dim": draw.choice([64, 128, 256]),
        "max_kv_len": draw.randint(1, draw.choice([1500, 20_000, 200_000])),
        "fp8": draw.random() < 0.5,
        "packed": packed,
        "fixed_split": fixed_split,
        "page_size": draw.choice([1, 5, 16, 64]),
        "gpu": draw.choice([*GPUS.values(), Gpu(20, True, 227 * 1024, 228 * 1024)]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_attention_plan_sizes_are_consistent(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        shape = random_shape(draw)
        plan = sd.attention_plan(**shape)
        assert sd.attention_plan(**shape, plan=plan.name) == plan
        assert plan.variant in _C.attention_variants()
        if plan.name == "plain":
            continue
        gpu = shape["gpu"]
        assert isinstance(gpu, Gpu) and plan.name.startswith("sm90." if gpu.has_wgmma else "sm80.")
        assert 1 <= plan.row_tiles <= 4
        short = ".".join(plan.name.split(".")[:3])  # the rest follows the rules
        forced = sd.attention_plan(**shape, plan=short)
        assert forced.name.startswith(short) and forced.tile_rows == plan.tile_rows
        if plan.cluster_blocks:
            assert 2 <= plan.cluster_blocks <= 8 and 1 <= plan.sharing_clusters <= 8
            assert (plan.workspace_bytes > 0) == (plan.sharing_clusters > 1)
        else:
            # All blocks of a persistent grid run at once.
            assert plan.workers * plan.row_tiles <= max(gpu.num_sms * plan.blocks_per_sm, plan.row_tiles)
            assert (plan.workspace_bytes > 0) != plan.whole_items


SHAPE = {"batch": 1, "q_rows": 16, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "max_kv_len": 32768}
NAMES = (
    "plain, sm80.mma.16, sm80.mma.32, sm80.mma.64, sm90.wgmma.64, sm90.wgmma.128, sm90.dequant_smem.64, "
    "sm90.dequant_smem.128, sm90.dequant_registers.16, sm90.dequant_registers.32, sm90.dequant_registers.64, "
    "sm90.cluster.16, sm90.cluster.64, sm90.cluster.128"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "fast"}, f"plan is fast, expected one of {NAMES}, optionally followed by options"),
        ({"plan": "sm90.cluster.160"}, f"plan is sm90.cluster.160, expected one of {NAMES}, optionally followed by options"),
        ({"plan": "sm90.cluster.16.whole"}, "plan is sm90.cluster.16.whole, expected options of blocks<number>, sharing<number>"),
        ({"plan": "sm90.wgmma.64.occupancy"}, "plan is sm90.wgmma.64.occupancy, expected options of split, whole, occupancy<number>"),
        ({"plan": "plain.16"}, f"plan is plain.16, expected one of {NAMES}, optionally followed by options"),
        ({"plan": "sm90.cluster.16", "tensor_cores": False}, "plan is sm90.cluster.16, expected plain where tensor cores cannot be used"),
        ({"plan": "sm80.mma.16"}, "plan is sm80.mma.16, expected plain or a plan of sm90 on this device"),
        ({"plan": "sm90.wgmma.64", "gpu": sd.A100}, "plan is sm90.wgmma.64, expected plain or a plan of sm80 on this device"),
        ({"plan": "sm90.cluster.16", "fixed_split": 128}, "plan is sm90.cluster.16, expected one without clusters with fixed_split"),
        ({"plan": "sm90.cluster.16.blocks9"}, "plan is sm90.cluster.16.blocks9, expected 2 to 8 blocks of a cluster"),
        ({"plan": "sm90.cluster.16.sharing0"}, "plan is sm90.cluster.16.sharing0, expected 1 to 8 clusters that share"),
        ({"plan": "sm90.cluster.64.sharing2"}, "plan is sm90.cluster.64.sharing2, expected one for head_dim 128 and 16-bit pools"),
        ({"plan": "sm90.cluster.128", "head_dim": 256}, "plan is sm90.cluster.128, expected one for head_dim 256 and 16-bit pools"),
        ({"plan": "sm90.wgmma.64", "fp8": True}, "plan is sm90.wgmma.64, expected one for head_dim 128 and 8-bit pools"),
        ({"plan": "sm90.wgmma.64.occupancy3"}, "plan is sm90.wgmma.64.occupancy3, expected occupancy1 or occupancy2"),
        ({"plan": "sm90.wgmma.128.occupancy2"}, "plan is sm90.wgmma.128.occupancy2, expected occupancy1"),
        ({"plan": "sm90.wgmma.64.whole", "packed": True}, "plan is sm90.wgmma.64.whole, expected split for packed rows, more rows than the row tiles have, or fixed_split"),
        ({"plan": "sm90.cluster.64", "batch": 70_000}, "plan is sm90.cluster.64, expected one without clusters for a batch of this size"),
        ({"batch": 0}, "batch is 0, expected 1 to 2147483647"),
        ({"q_rows": 0}, "q_rows is 0, expected 1 to 2147483647"),
        ({"q_heads": 12}, "q_heads is 12, expected a multiple of kv_heads=8"),
        ({"head_dim": 96}, "head_dim is 96, expected 64, 128 or 256"),
        ({"max_kv_len": 0}, "max_kv_len is 0, expected 1 to 2147483647"),
        ({"fixed_split": 100}, "fixed_split is 100, expected a positive multiple of 128"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.attention_plan(**SHAPE | change)
    assert str(error.value) == "attention_plan: " + message
