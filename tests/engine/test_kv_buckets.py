"""Rounds are made for the KV their texts have, not for what a page table has room for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.engine import (
    AttentionCall,
    Draft,
    Eagle3,
    Engine,
    EngineOptions,
    GenerationError,
    Needs,
    SamplingParams,
    Standalone,
)
from specdec_kernels.engine.config import EngineConfig, Machine
from specdec_kernels.engine.device.graphs import RoundSize
from specdec_kernels.engine.device.kv_buckets import MOST_BOUNDS, kv_bounds, plan_boundaries
from specdec_kernels.engine.device.state import EngineState
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.plans import mla_plan
from specdec_kernels.synthetic.shapes import shape_config
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering
from support.observed_rounds import wrap_launch
from support.tiny_checkpoint import Comparison, held_out, reference_model

GPU = Machine(torch.device("cuda"), 140 * 10**9, sd.H200)
QWEN3 = shape_config("qwen3-8b")


class Head(Draft):
    """A draft with the needs of an EAGLE-3 head of an 8B model."""

    def needs(self, target: Any) -> Needs:
        attention = tuple(AttentionCall.of(QWEN3, rows, False) for rows in (8, 6))
        return Needs(num_nodes=32, accept_width=6, scratch_rows=33, kv_numbers=2048, attention=attention)


def resolve(machine: Machine = GPU, draft: Draft | None = None, **options: Any) -> EngineConfig:
    return EngineConfig.resolve(QWEN3, draft or Head(), machine, EngineOptions(dtype=torch.bfloat16, **options))


def bounds_of(config: EngineConfig, batch: int, num_nodes: int) -> list[int]:
    return [size.max_kv_len for size in config.round_sizes if size[:2] == (batch, batch * num_nodes)]


# --- which there are


def test_rounds_of_latent_targets_have_the_bounds_of_their_plans() -> None:
    config = shape_config("glm-4.7-flash:4")
    call = AttentionCall.of(config, None, True)
    assert call[1:4] == (20, 1, 576) and call.latent_dim == 512
    options = {"page_size": 64, "fp8": False, "tensor_cores": True}
    for batch in (1, 16):
        bounds = kv_bounds([call], batch, 4 * batch, 4, 40000, sd.H200, **options)
        names = [
            mla_plan(batch=batch, q_rows=4 * batch, packed=True, q_heads=20, max_kv_len=bound).name for bound in bounds
        ]
        assert bounds[-1] == 40000 and len(bounds) <= MOST_BOUNDS
        assert len(set(names)) == len(names)


def test_a_head_of_one_layer_decides_no_bounds() -> None:
    """Of 64 slots every batch size from 12 on would have a bound more; a draft of many layers has a say."""

    class OneLayer(Head):
        def needs(self, target: Any) -> Needs:
            calls = AttentionCall.of(QWEN3, 8, False, 4), AttentionCall.of(QWEN3, 6, False, 1)
            return replace(super().needs(target), attention=calls)

    head, whole = (resolve(draft=draft, max_len=8192, num_slots=64) for draft in (OneLayer(), Head()))
    assert sum(map(len, head.rows)) == sum(map(len, whole.rows)) == 109
    assert (len(head.round_sizes), len(whole.round_sizes)) == (
        150,
        210,
    )  # of 10 batch sizes, with a first round of each
    assert set(head.round_sizes) <= set(whole.round_sizes)
    assert bounds_of(head, 64, 2) == [8226] and bounds_of(whole, 64, 2) == [2304, 8226]
    assert bounds_of(head, 12, 2) == bounds_of(whole, 12, 2) == [4352, 8226]  # the target's own


def test_kv_buckets_of_8b_model_on_h200() -> None:
    short, long = resolve(max_len=2048), resolve(max_len=32768)
    assert short.batch_sizes == long.batch_sizes == (1, 2, 4, 8) and [*map(len, short.rows)] == [10, 11, 11, 11]
    assert (len(short.round_sizes), len(long.round_sizes)) == (56, 94)  # of 43 batch sizes and numbers of rows
    assert bounds_of(short, 1, 32) == [2082] and bounds_of(short, 4, 32) == [1088, 2082]
    assert bounds_of(long, 1, 1) == [32802] and bounds_of(long, 1, 16) == [16384, 32802]
    assert bounds_of(long, 1, 32) == [16384, 32802]
    assert bounds_of(long, 4, 32) == [1088, 16384, 32802]


def test_a_plain_engine_asks_for_its_target_alone() -> None:
    config = resolve(draft=Draft(), max_len=32768, num_slots=4)
    assert config.round_sizes == (
        RoundSize(1, _C.FIRST_ROUND, 32770), RoundSize(1, 1, 32770),
        RoundSize(2, _C.FIRST_ROUND, 32770), RoundSize(2, 2, 1088), RoundSize(2, 2, 32770),
        RoundSize(4, _C.FIRST_ROUND, 32770), RoundSize(4, 4, 16384), RoundSize(4, 4, 32770),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"machine": GPU._replace(gpu=None)}, {"batch_invariant": True}])
def test_kv_buckets_of_constant_plan_is_one(options: dict[str, Any]) -> None:
    config = resolve(**options, max_len=32768)
    assert {size.max_kv_len for size in config.round_sizes} == {32768 + config.reserve}


def test_float32_has_one_plan() -> None:
    config = EngineConfig.resolve(QWEN3, Head(), GPU, EngineOptions(dtype=torch.float32, max_len=32768, num_slots=2))
    assert len(config.round_sizes) == sum(map(len, config.rows)) + len(config.batch_sizes)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_nothing_is_captured_where_nothing_is_launched_as_a_graph(cuda_graph: bool) -> None:
    assert bool(resolve(cuda_graph=cuda_graph).round_sizes) == cuda_graph


@pytest.mark.parametrize("seed", range(10))
def test_up_to_a_bound_plans_are_those_at_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, most, fp8 = draw.choice([1, 2, 4, 8]), draw.randint(100, 200_000), draw.random() < 0.5
    calls = [AttentionCall(draw.randint(1, 64), 4 * kv_heads, kv_heads, 128, True) for _ in range(3)]
    batch, num_nodes = draw.randint(1, 64), draw.randint(1, 64)

    def plans(length: int) -> list[str]:
        shape = {"batch": batch, "q_heads": 4 * kv_heads, "kv_heads": kv_heads, "head_dim": 128, "fp8": fp8}
        return [
            sd.attention_plan(q_rows=min(call.q_rows, num_nodes), max_kv_len=length, **shape).name  # type: ignore[arg-type]
            for call in calls
        ]

    bounds = kv_bounds(
        calls, batch, batch * num_nodes, num_nodes, most, sd.H200, page_size=16, fp8=fp8, tensor_cores=True
    )
    every = plan_boundaries(plans, most)
    assert set(bounds) <= set(every) and bounds[-1] == most and len(bounds) == min(len(every), MOST_BOUNDS)
    for low, high in zip([0, *every], every, strict=False):
        for length in (low + 1, draw.randint(low + 1, high)):
            assert plans(length) == plans(high)


def test_kv_buckets_merge_nearest_bounds() -> None:
    """Each of six calls changes its plan elsewhere."""
    lengths = [1024, 1100, 4096, 9000, 10240, 32768]

    def plans(length: int) -> list[str]:
        return [str(length <= one) for one in lengths]

    assert plan_boundaries(plans, 70_000) == [*lengths, 70_000]
    calls = [AttentionCall(rows, 32, 8, 128, True) for rows in (1, 4, 8, 16, 32, 64)]
    bounds = kv_bounds(calls, 2, 128, 64, 131_072, sd.H200, page_size=16, fp8=True, tensor_cores=True)
    assert len(bounds) == MOST_BOUNDS and bounds[-1] == 131_072


def test_kv_buckets_use_current_gpu() -> None:
    if _C.cuda_version is None:
        with pytest.raises(NotImplementedError, match=r"^current_gpu: this build of specdec_kernels has no CUDA half"):
            _C.current_gpu()
    elif torch.cuda.is_available():
        gpu = Machine.of("cuda").gpu
        assert gpu is not None and gpu.num_sms == torch.cuda.get_device_properties(0).multi_processor_count
        assert gpu == sd.H200 or "H200" not in torch.cuda.get_device_name()


# --- texts that outgrow them


TARGET = tiny_model("target")
DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "eagle3": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
}


@pytest.mark.parametrize(("name", "rounds_in_flight"), covering(DRAFTS, [1, 2, 3]))
def test_kv_bucket_crossing_keeps_texts(
    name: str, rounds_in_flight: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round gets its longest KV, and on a GPU runs the smallest graph for it.

    Texts equal those of an engine whose rounds are all for the longest KV. Some requests are retracted.
    """
    prompts = [prompt[: 20 + 7 * i] for i, prompt in enumerate(held_out("code")[:8]) if i > 2]
    params = SamplingParams(max_new_tokens=120, ignore_eos=True)
    steps = (96, 112, 128, 160, 192)

    def generate(bounded: bool) -> tuple[list[list[int]], set[int], int]:
        def bounds(
            calls: object, batch: int, num_rows: int, most_nodes: int, most: int, *_: object, **__: object
        ) -> tuple[int, ...]:
            return (*steps, most) if bounded else (most,)

        monkeypatch.setattr("specdec_kernels.engine.config.kv_bounds", bounds)
        engine = Engine(
            TARGET,
            draft=DRAFTS[name](),
            adaptive=False,
            max_len=512,
            num_slots=4,
            num_pages=40,
            rounds_in_flight=rounds_in_flight,
            dtype=torch.float32,
            device=device,
        )
        seen: set[int] = set()
        most = engine.config.max_len + engine.config.reserve

        def launch_bounded(launch: Callable[..., None], batch: int, num_rows: int, max_kv_len: int) -> None:
            seen.add(max_kv_len)
            launch(batch, num_rows, max_kv_len if bounded else most)

        wrap_launch(engine, launch_bounded)
        outputs = engine.generate(prompts, params)
        if engine.graphs is not None:
            num_kinds = sum(map(len, engine.config.all_rows))
            beside = 1 + len(engine.config.batch_sizes)  # commands alone, and first rounds
            assert len(engine.graphs.by_size) == beside + (1 + len(steps) if bounded else 1) * num_kinds
            assert not seen
        return [output.tokens for output in outputs], seen, engine.stats().retractions

    want, _, _ = generate(bounded=False)
    got, seen, retractions = generate(bounded=True)
    comparison = Comparison(reference_model())
    for prompt, tokens, those in zip(prompts, got, want, strict=True):
        comparison.check(prompt, tokens, those)
    assert len(comparison.near_ties) <= (device.type == "cuda") and retractions > 0
    if device.type == "cpu":
        assert min(seen - {0}) < steps[0] and max(seen) > 180 and len(seen) > 20


def test_round_with_too_small_kv_bound_raises(device: torch.device) -> None:
    """The bound is what attention goes by, and a wrong one is no wrong text."""
    engine = Engine(TARGET, max_len=512, num_slots=1, dtype=torch.float32, device=device, cuda_graph=False)
    wrap_launch(engine, lambda launch, batch, num_rows, max_kv_len: launch(batch, num_rows, min(max_kv_len, 40)))
    with pytest.raises(GenerationError, match=r"BAD_LENGTH") as error:
        engine.generate([held_out("code")[0][:30]], SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert 5 <= len(error.value.outputs[0].tokens) <= 12


def test_engine_state_rows_take_their_bound_as_an_argument() -> None:
    state = Engine(TARGET, max_len=64, num_slots=1, device="cpu").state
    assert state.rows(state.seq_lens, state.seq_lens, 1, max_kv_len=7).max_kv_len == 7
    assert state.rows(state.seq_lens, state.seq_lens, 1).max_kv_len is None


@pytest.mark.parametrize(
    "draft", [Eagle3(tiny_model("eagle3"), num_steps=3, topk=2, num_nodes=6), None], ids=["eagle3", "none"]
)
def test_round_bounds_every_forward_pass(draft: Eagle3 | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target, draft steps, draft-extend and catch-up get the bound with which their round is launched."""
    engine = Engine(TARGET, draft=draft, max_len=64, num_slots=1, dtype=torch.float32, device="cpu")
    launched: set[int | None] = set()
    bounds: set[int | None] = set()
    rows = EngineState.rows

    def note_launch(launch: Callable[..., None], batch: int, num_rows: int, max_kv_len: int) -> None:
        launched.add(max_kv_len)
        launch(batch, num_rows, max_kv_len)
        assert bounds <= {max_kv_len}
        bounds.clear()

    def note_rows(*args: Any, **options: Any) -> PagedBatch:
        bounds.add(options.get("max_kv_len"))
        return rows(*args, **options)

    wrap_launch(engine, note_launch)
    monkeypatch.setattr(EngineState, "rows", note_rows)
    engine.generate([[1, 2, 3]], SamplingParams(8, ignore_eos=True))
    assert None not in launched and len(launched) > 1
