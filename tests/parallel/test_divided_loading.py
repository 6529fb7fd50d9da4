"""A rank's part of a checkpoint, read layer by layer: what dividing the whole module gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.shard import Shard
from specdec_kernels.models.weights import divided_loading
from specdec_kernels.models.weights.loading import load_causal_lm
from support.divided_models import options
from support.exhaustive import exhaustive
from support.hybrid_cases import HYBRIDS, hybrid_module
from support.latent_cases import LATENT, latent_module
from support.quantized_checkpoints import quantize, write_model
from support.random_checkpoints import save_random_model
from support.step_cases import write_step
from support.thread_reduction import ThreadReduction

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def opened(source: Any, rank: int) -> CausalLM:
    return CausalLM(source, options(shard=Shard(rank, 2), reduction=ThreadReduction(2)))


def expect_same_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def loaded(folder: Path, wanted: Any) -> dict[str, torch.Tensor]:
        nonlocal largest
        tensors = load(folder, wanted)
        largest = max(largest, sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    load = divided_loading.load_tensors
    monkeypatch.setattr(divided_loading, "load_tensors", loaded)
    whole = load_causal_lm(folder, torch.float32)
    total = sum(tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers()))
    for rank in range(2):
        ours, theirs = opened(folder, rank).model, opened(load_causal_lm(folder, torch.float32), rank).model
        for each in (ours, theirs):
            assert not any(tensor.is_meta for tensor in (*each.parameters(), *each.buffers()))
        got, want = (dict(each.named_parameters()) | dict(each.named_buffers()) for each in (ours, theirs))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
            assert torch.equal(got[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    assert largest < 0.7 * total


def saved(case: str, folder: Path) -> Path:
    if case in (*HYBRIDS, *LATENT):
        module = hybrid_module(case) if case in HYBRIDS else latent_module(case)
        module.save_pretrained(folder)
        return folder
    return save_random_model(folder, case, tie_word_embeddings=case == "llama")


def test_a_rank_reads_its_part_of_experts_that_are_stored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is Step-3.5's, whose query heads differ between layers; its MTP layer is left out."""
    folder = write_step(tmp_path / "model", 1, hidden_size=256, moe_intermediate_size=256)
    quantize(folder, "fp8 blocks", r"model\.layers\.1\.moe\.(gate|up|down)_proj\.weight")
    expect_same_parts(folder, monkeypatch)


CASES = ["qwen3_moe", *exhaustive("llama", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "kimi_linear")]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_what_dividing_the_whole_gives(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_same_parts(saved(case, tmp_path / "model"), monkeypatch)


@pytest.mark.parametrize("name", ["fp8 blocks", *exhaustive("gptq", "fp8 rows", "awq", "packed")])
def test_a_rank_reads_its_part_of_quantized_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_model(tmp_path, name, **SIZES)
    expect_same_parts(folder, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_moe", "fp8 blocks"), ("minimax_m2", "fp8 weights alone"), ("mixtral", "gptq")]
)
def test_a_rank_reads_its_part_of_quantized_experts(
    model_type: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"moe_intermediate_size": 512, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    folder, _ = write_model(tmp_path, name, model_type, **sizes)
    expect_same_parts(folder, monkeypatch)


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "llama", num_hidden_layers=2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    part = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.down_proj.weight, expected every tensor"):
        opened(folder, 0)
    save_file(tensors | {"model.layers.1.mlp.down_proj.weight": part, "other": part.clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="has other, unknown to LlamaForCausalLM"):
        opened(folder, 0)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
