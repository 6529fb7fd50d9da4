"""Engines of several processes over gloo: kinds of models, read from folders, say what one process says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.engine import MTP, Draft, Engine, Ngram, SamplingParams
from specdec_kernels.models.weights.checkpoint import load_tensors
from support.block_drafters import draft_of, write_drafter, write_target
from support.changed_weights import changed
from support.hybrid_cases import hybrid_module
from support.hybrid_servers import write_hybrid_with_mtp
from support.latent_cases import latent_module
from support.quantized_checkpoints import write_model
from support.random_checkpoints import save_random_model
from support.step_cases import write_step

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
    "MTP chain": lambda folder: write_step(folder, 3),
    "quantized": lambda folder: write_model(folder, "gptq", hidden_size=256, intermediate_size=384)[0],
}
DRAFTS: dict[str, Callable[[], Draft]] = {"MTP layer": MTP, "MTP chain": lambda: MTP(num_steps=3)}
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
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dspark", {}),
        ("dspark", {"topk": 1}),
        ("dspark", {"topk": 1, "sampled": True}),
        ("dspark", {"draft_weights": "fp8-head"}),
        ("dflash2", {}),
        ("dflash window", {}),
        ("dspark rnn", {}),
    ],
)
def test_ranks_say_what_one_process_says_with_block_drafters(name: str, options: Any, tmp_path: Path) -> None:
    """The drafter is whole on each rank, and drafts with the target's divided LM head."""
    folder, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter", name)
    want = texts(folder, draft_of(name, drafter, **options), adaptive=False)
    assert texts(folder, draft_of(name, drafter, **options), adaptive=False, tp=2) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "tp"), SHARES)
def test_ranks_say_what_one_process_says(kind: str, tp: int, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "model")
    draft = DRAFTS.get(kind, lambda: Ngram(num_nodes=6))
    want = texts(folder, draft(), adaptive=False)
    assert texts(folder, draft(), adaptive=False, tp=tp) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "tp"), SHARES)
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8_e4m3"}], ids=["", "fp8"])
def test_requests_move_between_ranks_and_one_process(
    kind: str, tp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = KINDS[kind](tmp_path / "model")
    draft = DRAFTS.get(kind, lambda: Ngram(num_nodes=6))
    params = SamplingParams(70, ignore_eos=True)
    own = SIZES | options | {"adaptive": False}
    with Engine(folder, draft(), **own) as alone, Engine(folder, draft(), **own | {"page_size": 4}, tp=tp) as ranks:
        (want,) = alone.generate(PROMPTS[:1], params)
        request = alone.submit(PROMPTS[0], params)
        for here, there in ((alone, ranks), (ranks, alone), (alone, ranks)):
            next(iter(request))
            exported = here.export_request(request)
            request = there.import_request(exported)
        assert request.result().tokens == want.tokens
        assert int(exported.num_bytes) > 0 and ranks.stats().rounds > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "tp"), SHARES)
def test_ranks_get_their_parts_of_new_weights(kind: str, tp: int, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "model")
    draft = DRAFTS.get(kind, lambda: Ngram(num_nodes=6))
    params, own = SamplingParams(24, ignore_eos=True), SIZES | {"adaptive": False}
    old = load_tensors(folder, lambda _: True)
    with Engine(folder, draft(), **own) as alone, Engine(folder, draft(), **own, tp=tp) as ranks:
        want = [output.tokens for output in alone.generate(PROMPTS, params)]
        ranks.sleep(2)
        ranks.wake()
        ranks.update_weights(old)
        assert [output.tokens for output in ranks.generate(PROMPTS, params)] == want
        assert ranks.weights_checksum() == alone.weights_checksum()
        if kind != "quantized":
            for each in (alone, ranks):
                each.update_weights(changed(old, 0.3))
            texts = [[output.tokens for output in each.generate(PROMPTS, params)] for each in (alone, ranks)]
            assert texts[0] == texts[1] != want
