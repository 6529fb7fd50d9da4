"""Engines of several processes over gloo: kinds of models, read from folders, say what one process says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.engine import MTP, Draft, Engine, Ngram, SamplingParams
from support.hybrid_cases import hybrid_module
from support.hybrid_servers import write_hybrid_with_mtp
from support.latent_cases import latent_module
from support.quantized_checkpoints import write_model
from support.random_checkpoints import save_random_model

SIZES: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_len": 96, "num_slots": 3, "page_size": 8}
PROMPTS = [[5, 9, 3, 9, 3, 7, 1], [8, 8, 2], list(range(20, 40))]


def saved(module: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: save_random_model(folder, "llama", num_key_value_heads=1, intermediate_size=192),
    "experts": lambda folder: save_random_model(folder, "qwen3_moe"),
    "gated delta net": lambda folder: saved(hybrid_module("qwen3_next"), folder),
    "mamba 2": lambda folder: saved(hybrid_module("nemotron_h"), folder),
    "latent": lambda folder: saved(latent_module("deepseek_v3"), folder),
    "MTP layer": write_hybrid_with_mtp,
    "quantized": lambda folder: write_model(folder, "gptq", hidden_size=256, intermediate_size=384)[0],
}
SHARES = [*((kind, 2) for kind in KINDS), ("dense", 3)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the processes that tests start use a core each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def texts(folder: Path, draft: Draft | None, **options: Any) -> list[list[int]]:
    params = [SamplingParams(20, ignore_eos=True), SamplingParams(20, ignore_eos=True, temperature=0.7, seed=3)]
    with Engine(folder, draft, **SIZES | options) as engine:
        outputs = engine.generate(PROMPTS, [*params, params[0]])
    return [output.tokens for output in outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "tp"), SHARES)
def test_ranks_say_what_one_process_says(kind: str, tp: int, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "model")
    draft: Callable[[], Draft] = (lambda: MTP()) if kind == "MTP layer" else lambda: Ngram(num_nodes=6)
    want = texts(folder, draft(), adaptive=False)
    assert texts(folder, draft(), adaptive=False, tp=tp) == want
