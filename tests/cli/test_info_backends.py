"""`specdec info MODEL` reports what an engine of the model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.cli import main
from specdec_kernels.engine import DFlash, Engine
from specdec_kernels.engine.drafts.composition import pools_of
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.backends.select import BackendSummary, open_language_model, summarize_backend
from specdec_kernels.models.backends.share import share_of
from specdec_kernels.models.layers.mlp import GatedMLP
from specdec_kernels.models.layers.moe import Fp8Experts, MoE
from specdec_kernels.models.layers.quantized import Fp8Weight, Int4Weight
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.shard import Shard
from specdec_kernels.models.state_cache import StateCache
from support.block_drafters import write_drafter, write_target
from support.divided_models import options as divided_options
from support.family_cases import random_module
from support.hybrid_cases import HYBRIDS, hybrid_module
from support.latent_cases import LATENT, latent_module
from support.quantized_checkpoints import EXPERTS, write_model
from support.thread_reduction import ThreadReduction
from support.tiny_random_models import NATIVE, WINDOW, tiny_model


def opened(folder: Path) -> tuple[BackendSummary, Any]:
    """Return what `specdec info` prints, and the target that an engine opens."""
    with Engine(str(folder), max_len=64, device="cpu", dtype=torch.float32, adaptive=False) as engine:
        way = summarize_backend(str(folder))
        assert way.implementation == engine.config.implementation
        return way, engine.target


def saved(folder: Path, model_type: str, **more: Any) -> Path:
    tiny_model(model_type, **more).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "model_type", "linears", "kind"),
    [
        ("fp8 blocks", "llama", "in FP8, activations quantized per group", Fp8Weight),
        ("fp8 rows", "llama", "in FP8, activations quantized per token", Fp8Weight),
        ("fp8 static", "llama", "in FP8, activations quantized by the checkpoint's scales", Fp8Weight),
        ("fp8 weights alone", "llama", "in FP8", Fp8Weight),
        ("gptq", "qwen3", "in INT4", Int4Weight),
    ],
)
def test_info_names_the_dtypes_of_linears(name: str, model_type: str, linears: str, kind: type, tmp_path: Path) -> None:
    way, target = opened(write_model(tmp_path, name, model_type)[0])
    assert way.linears == linears and way.experts is None
    parts = [part for layer in target.decoder.layers for part in (layer.mixer.qkv, layer.feed_forward.down)]
    assert all(type(part.weight) is kind for part in parts)
    activations = {getattr(part.weight, "activations", "none") for part in parts}
    rounded = {"none": "", "token": "per token", "group": "per group", "static": "checkpoint's scales"}
    assert rounded[activations.pop()] in linears and not activations


def test_info_tells_what_a_draft_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter", "dflash window")
    command = ["info", str(target), "--speculative-draft-model-path"]
    assert main([*command, str(drafter), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["draft"] == "DFLASH, at most 5 tokens on a path and 32 nodes"
    # Keys and values of two KV heads of 64 elements, in two layers.
    kv = "1024 bytes for each token in 16 bits, 512 in 8"
    assert facts["draft_kv"] == f"{kv}; the last 7 rows in some layers, all of them with a prefix cache"
    with Engine(str(target), draft=DFlash(drafter), max_len=64, device="cpu", dtype=torch.float32) as engine:
        [pools] = pools_of(engine.draft)
        assert pools.num_bytes == 4 * 512 * pools.num_pages * pools.page_size
    assert main([*command, str(target)]) == 0 and "STANDALONE" in capsys.readouterr().out
    assert main([*command, str(tmp_path)]) == 2 and "draft model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "experts"),
    [("fp8 rows", "4, in FP8, activations quantized per token"), ("awq", "4, dequantized to the engine's dtype")],
)
def test_info_names_quantized_experts(name: str, experts: str, tmp_path: Path) -> None:
    way, target = opened(write_model(tmp_path, name, "qwen3_moe", **EXPERTS)[0])
    assert way.experts == experts
    parts = [layer.feed_forward for layer in target.decoder.layers]
    of_experts = [part.experts for part in parts if isinstance(part, MoE)]
    assert of_experts and all(isinstance(part, Fp8Experts) == ("FP8" in experts) for part in of_experts)


@pytest.mark.parametrize(
    ("model_type", "more", "windows"),
    [
        ("llama", NATIVE, "all rows in every layer"),
        ("mistral", NATIVE, f"the last {WINDOW} rows"),
        (
            "gemma3_text",
            NATIVE | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            f"the last {WINDOW} rows in some layers, all rows in others",
        ),
        ("mimo_v2_flash", {}, f"as its modules ask: the last {WINDOW} rows or all"),
        ("gpt2", {}, "as its modules ask"),
    ],
)
def test_info_names_sliding_windows(model_type: str, more: dict[str, Any], windows: str, tmp_path: Path) -> None:
    way, target = opened(saved(tmp_path, model_type, **more))
    assert way.windows == windows
    said = {f"the last {group.layout.window} rows" for group in target.pools.groups if group.layout.window is not None}
    assert all(each in windows for each in said) and ("all" in windows or way.implementation == "transformers") == any(
        group.layout.window is None for group in target.pools.groups
    )
    assert way.linears == "in the engine's dtype" and way.experts in (None, "4, in the engine's dtype")


@pytest.mark.parametrize("model_type", ["qwen3", "nanochat"])
def test_info_names_feature_layers(model_type: str, tmp_path: Path) -> None:
    """Any layer that is said to have them gives them."""
    folder = saved(tmp_path, model_type, **NATIVE)
    count = 4
    assert f" {count} layers" in summarize_backend(str(folder)).features
    options = ModelOptions(
        max_len=64, num_pages=8, page_size=8, dtype=torch.float32, device=torch.device("cpu"),
        feature_layers=tuple(range(count + 1)),
    )  # fmt: skip
    lm = open_language_model(str(folder), options)
    assert lm.feature_layers == tuple(range(count + 1))
    layers = getattr(getattr(lm, "decoder", None), "layers", None) or lm._layers()  # type: ignore[attr-defined]
    assert len(layers) == count


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_info_names_the_size_of_recurrent_states(model_type: str, tmp_path: Path) -> None:
    way, target = opened(saved(tmp_path, model_type, dtype="float32"))
    specs, device = target.states.specs, torch.device("cpu")
    sizes = [StateCache.allocate(specs, 1, nodes, 1, device).num_bytes / 1e6 for nodes in (0, 1)]
    assert (
        way.states
        == f"{sizes[0]:.1f} MB a request or a snapshot, and {sizes[1] - sizes[0]:.2f} MB for each node of its trees"
    )
    assert way.windows == "all rows in layers with attention"


def test_info_agrees_on_the_dtype_of_dense_parts(tmp_path: Path) -> None:
    way, target = opened(saved(tmp_path, "llama", **NATIVE))
    assert way.layers == "native" and way.rounds == "captured as CUDA graphs"
    for layer in target.decoder.layers:
        assert isinstance(layer.feed_forward, GatedMLP)
        assert isinstance(layer.mixer.qkv.weight, Tensor)


@pytest.mark.parametrize("case", ["olmo2 32", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_info_counts_what_a_rank_holds(case: str, tmp_path: Path) -> None:
    module = hybrid_module(case) if case in HYBRIDS else latent_module(case) if case in LATENT else random_module(case)
    module.save_pretrained(tmp_path)
    for size in (1, 2):
        share = share_of(tmp_path, size)
        options = divided_options(shard=Shard(0, size), reduction=ThreadReduction(size))
        lm = CausalLM(tmp_path, options)
        parameters = {p.data_ptr(): p for p in lm.model.parameters()}  # a tied head has rows of the embedding
        assert share.weights == sum(p.nbytes for p in parameters.values())
        assert lm.pools.num_bytes == 4 * share.kv_elements * 8 * 4
        specs = lm.states.specs if lm.states is not None else []
        assert share.state == sum(spec.nbytes for spec in specs)
        assert share.tokens(share.weights + 100 * share.kv_elements, 2) == 50


def test_info_says_what_each_of_several_gpus_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path, "qwen3_next")
    assert main(["info", str(folder), "--tp", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 2 and " GB of " in facts["rank_weights"]
    assert facts["rank_kv"].startswith("512 bytes for each token in 16 bits of 1024")
    assert " MB a request or a snapshot" in facts["rank_states"]
    assert main(["info", str(folder), "--tp", "3"]) == 2
    assert "is 4, expected a multiple of 3 (ranks)" in capsys.readouterr().err
    assert main(["info", "--tp", "2"]) == 2
    assert capsys.readouterr().err == "specdec info: --tp is given, expected a model too\n"
    quantized = write_model(tmp_path / "quantized", "gptq", "qwen3")[0]
    assert main(["info", str(quantized), "--tp", "2"]) == 0
    assert "not known from the config of a quantized checkpoint" in capsys.readouterr().out
