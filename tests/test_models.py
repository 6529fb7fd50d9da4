"""Every supported architecture, on small random checkpoints, against transformers' own generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from random_models import random_prompts, save_random_model
from specdec_kernels.engine import Engine, SamplingParams, Speculation
from specdec_kernels.models.attention import Rows
from specdec_kernels.models.causal_lm import CausalLM
from specdec_kernels.models.checkpoint import load_tensors
from specdec_kernels.models.eagle3 import feature_layers, load_eagle3
from specdec_kernels.tiny import tiny_model
from tiny import Comparison, greedy_by_transformers, held_out, reference_model, target_with_features

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_text_is_that_of_transformers(
    model_type: str, algorithm: str, tmp_path: Path, device: torch.device
) -> None:
    folder = save_random_model(tmp_path / "target", model_type)
    draft = None
    if algorithm == "STANDALONE":
        draft = save_random_model(tmp_path / "draft", model_type, num_hidden_layers=1)
    engine = Engine(
        folder,
        speculation=Speculation(algorithm, draft, num_steps=3, topk=3, num_draft_tokens=9),
        max_len=256,
        num_slots=4,
        page_size=3,
        dtype=torch.float32,
        device=device,
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = random_prompts(10)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
    comparison = Comparison(reference)
    for prompt, output, want in zip(prompts, outputs, greedy_by_transformers(reference, prompts, 24), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "EAGLE3", "STANDALONE"])
def test_half_precision(algorithm: str, dtype: torch.dtype, device: torch.device) -> None:
    draft = {"EAGLE3": tiny_model("eagle3"), "STANDALONE": tiny_model("target")}.get(algorithm)
    speculation = Speculation(algorithm, draft, num_steps=3, topk=2, num_draft_tokens=8, adaptive=False)
    engine = Engine(tiny_model("target"), speculation=speculation, max_len=512, dtype=dtype, device=device)
    outputs = engine.generate(held_out("repeat")[:4], SamplingParams(max_new_tokens=24, ignore_eos=True))
    stats = [output.stats for output in outputs]
    assert [s.accepted + s.rounds for s in stats] == [24] * 4
    at_least = {"NONE": 1.0, "NGRAM": 1.5, "EAGLE3": 1.5, "STANDALONE": 3.0}[algorithm]
    assert sum(s.accept_length for s in stats) / 4 >= at_least


@torch.no_grad()
def test_features_are_the_states_that_enter_layers(device: torch.device) -> None:
    layers = tuple(range(reference_model().config.num_hidden_layers))
    tokens = torch.arange(5, 15)[None]
    states = reference_model()(tokens, output_hidden_states=True).hidden_states
    target = target_with_features(layers, device)
    positions = torch.arange(10, dtype=torch.int32, device=device)[None]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    pages = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    rows = Rows(zero, pages, zero, 10, num_valid=zero + 10, status=zero.clone())
    target.forward(tokens.int().to(device), positions, rows)
    torch.testing.assert_close(target.features().cpu(), torch.cat(states[: len(layers)], -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, "model: model_type is 'gpt2', expected one of ('llama', 'mistral', 'qwen2', 'qwen3')"),
        ("mistral", {"sliding_window": 64}, "model: sliding_window is 64, expected at least max_len=256"),
        ("llama", {"head_dim": 96}, "model: head_dim is 96, expected one of (64, 128, 256)"),
        ("qwen3", {"hidden_act": "gelu"}, "model: hidden_act is 'gelu', expected 'silu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "model: rope_type is 'dynamic', expected one whose rotations depend on positions alone",
        ),
        (
            "llama",
            {"max_position_embeddings": 128},
            "model: max_position_embeddings is 128, expected at least max_len=256",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(
    model_type: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    options = {"n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 256} if model_type == "gpt2" else {}
    folder = save_random_model(tmp_path, model_type, **(options | changes))
    with pytest.raises(ValueError) as error:
        Engine(folder, max_len=256, dtype=torch.float32, device="cpu")
    assert str(error.value) == message


# --- EAGLE-3 checkpoints


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return target_with_features((1, 2, 3))


def write_head(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """The tiny head's folder with other tensors or config entries."""
    import json

    folder.mkdir()
    text = json.loads((tiny_model("eagle3") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_tensors() -> dict[str, torch.Tensor]:
    return load_file(tiny_model("eagle3") / "model.safetensors")


def load(folder: Path, target: CausalLM) -> object:
    return load_eagle3(folder, target, num_pages=8, page_size=16)


def test_draft_vocabulary_maps_into_the_target(target: CausalLM) -> None:
    head = load_eagle3(tiny_model("eagle3"), target, num_pages=8, page_size=16)
    tensors = tiny_tensors()
    assert head.id_map is not None
    assert torch.equal(torch.nonzero(tensors["t2d"]).flatten().to(torch.int32), head.id_map.sort().values)
    assert len(head.id_map) == tensors["lm_head.weight"].shape[0] < target.config.vocab_size
    assert head.embed_tokens is target.embedding


def test_other_spellings_of_the_checkpoint_load(target: CausalLM, tmp_path: Path) -> None:
    tensors = {
        "model." + k.replace("midlayer.", "layers.0."): v for k, v in tiny_tensors().items() if k not in ("d2t", "t2d")
    }
    tensors |= {k: v for k, v in tiny_tensors().items() if k in ("d2t", "t2d")}
    head = load_eagle3(write_head(tmp_path / "x", tensors), target, num_pages=8, page_size=16)
    torch.testing.assert_close(head.fc.weight, tiny_tensors()["fc.weight"].float())


def test_bin_files_are_unpickled_without_code(target: CausalLM, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "x", tiny_tensors())
    (folder / "model.safetensors").unlink()
    torch.save(tiny_tensors(), folder / "pytorch_model.bin")
    load(folder, target)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("executed",)

    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(folder, target)


def test_heads_that_do_not_fit_are_refused_by_name(target: CausalLM, tmp_path: Path) -> None:
    tensors = tiny_tensors()
    missing = {k: v for k, v in tensors.items() if k != "midlayer.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"EAGLE-3 head: tensors are missing \['midlayer.mlp.up_proj.weight'\]"):
        load(write_head(tmp_path / "a", missing), target)
    with pytest.raises(ValueError, match=r"unknown \['midlayer.gate.weight'\]"):
        load(write_head(tmp_path / "b", tensors | {"midlayer.gate.weight": torch.ones(1)}), target)
    with pytest.raises(ValueError, match="EAGLE-3 head: d2t is missing for a draft vocabulary of"):
        load(write_head(tmp_path / "c", {k: v for k, v in tensors.items() if k != "d2t"}), target)
    with pytest.raises(ValueError, match="EAGLE-3 head: norm_before_fc is set, expected a head without it"):
        load(write_head(tmp_path / "d", tensors, norm_before_fc=True), target)
    with pytest.raises(ValueError, match="EAGLE-3 head: hidden_size is 128, expected the target's 256"):
        load(write_head(tmp_path / "e", tensors, hidden_size=128), target)
    (tmp_path / "f").mkdir()
    with pytest.raises(ValueError, match=r"has no \*.safetensors and no \*.bin, expected one of them"):
        load_tensors(tmp_path / "f")


def test_feature_layers_follow_the_config() -> None:
    class Config:
        eagle_config: dict[str, object] | None = None

    config = Config()
    assert feature_layers(config, 32) == (2, 16, 29)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert feature_layers(config, 4) == (1, 2, 3)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 9]}
    with pytest.raises(ValueError, match=r"EAGLE-3 head: feature layers are \(1, 10\), expected 0 to 4"):
        feature_layers(config, 4)
