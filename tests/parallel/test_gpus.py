"""Ranks on GPUs of one host: exchanges by kernels, and engines that say what one GPU says."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from specdec_kernels.engine import Draft, Eagle3, Engine, GenerationError, Ngram, SamplingParams, Standalone
from specdec_kernels.parallel.reductions import GroupReduction
from specdec_kernels.parallel.symmetric import SymmetricReduction
from specdec_kernels.tiny import tiny_model
from support.gpu_exchange import compare_sums, wait_for_a_rank_that_is_late
from support.tiny_checkpoint import held_out

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "chain": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=1, num_nodes=5),
    "tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "drawn": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1, sampled=True),
    "ngram": lambda: Ngram(num_nodes=6),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=5),
}
SIZES: dict[str, Any] = {"device": "cuda:0", "dtype": torch.float32, "max_len": 160, "num_slots": 4, "page_size": 8}
SIZES |= {"batch_sizes": (1, 4), "adaptive": False}
PROMPTS = [prompt[:60] for prompt in held_out("code")[:6]]
PARAMS = [SamplingParams(40, ignore_eos=True)] * 3
PARAMS += [SamplingParams(40, ignore_eos=True, temperature=0.8, seed=i) for i in range(3)]


def start(function: Any, *arguments: Any) -> None:
    mp.start_processes(function, arguments, nprocs=2, start_method="spawn")


def make_engine(draft: str, **options: Any) -> Engine:
    return Engine(tiny_model("target"), DRAFTS[draft](), **SIZES | options)


def said(engine: Engine) -> list[list[int]]:
    return [output.tokens for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def on_one_gpu() -> list[list[int]]:
    """Return what one GPU says, whatever drafts, unless they are drawn."""
    with make_engine("none") as engine:
        return said(engine)


def reduction_of(engine: Engine) -> Any:
    ranks = engine.core.runtime.ranks
    assert ranks is not None
    return ranks.reduction


@pytest.mark.parametrize("seed", [1, 2])
def test_sums_in_replayed_graphs_have_the_bits_of_sums_in_the_order_of_ranks(seed: int, tmp_path: Path) -> None:
    start(compare_sums, str(tmp_path), 2, seed, 2000)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_wait_for_a_rank_that_makes_no_call_ends_and_names_it(aborts: bool, tmp_path: Path) -> None:
    start(wait_for_a_rank_that_is_late, str(tmp_path), 2, aborts)


@pytest.mark.parametrize("draft", DRAFTS)
def test_two_gpus_say_what_one_says(draft: str, on_one_gpu: list[list[int]]) -> None:
    with make_engine(draft, tp=2) as engine:
        assert isinstance(reduction_of(engine), SymmetricReduction)
        on_two = said(engine)
        assert not reduction_of(engine).timed_out
    if draft == "drawn":  # sampled text depends on where rounds begin
        with make_engine(draft) as engine:
            on_one_gpu = said(engine)
    assert on_two == on_one_gpu


def test_engines_one_after_another_sleep_and_wake(on_one_gpu: list[list[int]]) -> None:
    for kernels in (True, False, True):
        with make_engine("tree", tp=2, custom_all_reduce=kernels) as engine:
            assert isinstance(reduction_of(engine), SymmetricReduction if kernels else GroupReduction)
            assert said(engine) == on_one_gpu
            for _ in range(2):
                engine.sleep(1)
                engine.wake()
                assert said(engine) == on_one_gpu
    gc.collect()


def test_a_rank_that_hangs_ends_the_engine_with_its_name() -> None:
    engine = make_engine("tree", tp=2)
    process = engine.core.runtime.ranks.channel.process(1)  # type: ignore[union-attr]
    request = engine.submit(PROMPTS[0], SamplingParams(90, ignore_eos=True))
    next(iter(request))
    os.kill(process, signal.SIGSTOP)
    started = time.monotonic()
    name = rf"rank 1 \(process {process}\) has (sent nothing in a reduction for 5 s|not )"
    with pytest.raises((RuntimeError, GenerationError), match=name):
        for _ in range(100):
            request.result(timeout=20)
            request = engine.submit(PROMPTS[0], SamplingParams(90, ignore_eos=True))
    assert time.monotonic() - started < 10
    engine.close()
    assert time.monotonic() - started < 20
