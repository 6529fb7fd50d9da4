"""Every supported architecture, on small random checkpoints, against transformers' own generate."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.models.backends.native import CausalLM, supported_family
from specdec_kernels.models.backends.select import implementation_of
from specdec_kernels.models.families import base
from specdec_kernels.models.heads.eagle3 import Eagle3Head, feature_layers
from specdec_kernels.models.heads.loading import load_head
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering, exhaustive
from support.random_checkpoints import random_prompts, save_random_model
from support.tiny_checkpoint import Comparison, greedy_by_transformers, held_out, reference_model, target_with_features

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize(("model_type", "algorithm"), covering(ARCHITECTURES, ["ngram", "standalone"]))
def test_greedy_text_is_that_of_transformers(
    model_type: str, algorithm: str, tmp_path: Path, device: torch.device
) -> None:
    folder = save_random_model(tmp_path / "target", model_type)
    small = save_random_model(tmp_path / "draft", model_type, num_hidden_layers=1)
    draft = Ngram(num_nodes=9) if algorithm == "ngram" else Standalone(small, num_steps=3, topk=3, num_nodes=9)
    engine = Engine(
        folder,
        draft=draft,
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


# Windows shorter than prompts and texts: of all layers, of those from the third on, and of those that are listed.
WINDOWS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 13},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize(("model_type", "algorithm"), covering(WINDOWS, ["none", "ngram", "standalone"]))
def test_sliding_windows(model_type: str, algorithm: str, tmp_path: Path, device: torch.device) -> None:
    """Prompts of up to 59 tokens and 40 more: most rows of most layers see a window, and trees stand at its edge."""
    changes = WINDOWS[model_type]
    folder = save_random_model(tmp_path / "target", model_type, **changes)
    # A draft with a window of its own.
    small = save_random_model(tmp_path / "draft", "mistral", num_hidden_layers=1, sliding_window=5, hidden_size=96)
    drafts = {"ngram": Ngram(num_nodes=9), "standalone": Standalone(small, num_steps=3, topk=3, num_nodes=9)}
    engine = Engine(
        folder,
        draft=drafts.get(algorithm),
        max_len=256,
        num_slots=4,
        page_size=3,
        prefill_chunk=32,
        dtype=torch.float32,
        device=device,
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = random_prompts(8)
    comparison = Comparison(reference)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=40))
    for prompt, output in zip(prompts, outputs, strict=True):  # one at a time: padding takes no part in a window
        (want,) = greedy_by_transformers(reference, [prompt], 40)
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize("algorithm", [*exhaustive("ngram", "eagle3"), "standalone", "union"])
def test_sliding_windows_with_accepted_drafts(algorithm: str, tmp_path: Path, device: torch.device) -> None:
    """The trained model with windows that it was not trained with gives its own text, and accepts drafts."""
    folder = shutil.copytree(tiny_model("target"), tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"num_steps": 4, "topk": 3, "num_nodes": 12}
    drafts = {
        "ngram": Ngram(num_nodes=12),
        "eagle3": Eagle3(tiny_model("eagle3"), **options),
        "standalone": Standalone(folder, **options),
        "union": Union(Eagle3(tiny_model("eagle3"), **options), Ngram(num_nodes=12), num_nodes=12),
    }
    engine = Engine(
        folder,
        draft=drafts[algorithm],
        adaptive=False,
        max_len=512,
        dtype=torch.float32,
        device=device,
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = held_out("repeat")[:4]
    assert min(map(len, prompts)) > 24
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=48, ignore_eos=True))
    comparison = Comparison(reference)
    for prompt, output in zip(prompts, outputs, strict=True):
        (want,) = greedy_by_transformers(reference, [prompt], 48, eos_token_id=None)
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1
    assert sum(output.stats.accept_length for output in outputs) / 4 > 1.5


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    covering(["none", "ngram", "eagle3", "standalone"], [torch.float16, torch.bfloat16]),
    ids=str,
)
def test_half_precision(algorithm: str, dtype: torch.dtype, device: torch.device) -> None:
    drafts: dict[str, Draft] = {
        "ngram": Ngram(num_nodes=8),
        "eagle3": Eagle3(tiny_model("eagle3"), num_steps=3, topk=2, num_nodes=8),
        "standalone": Standalone(tiny_model("target"), num_steps=3, topk=2, num_nodes=8),
    }
    draft = drafts.get(algorithm)
    engine = Engine(tiny_model("target"), draft=draft, adaptive=False, max_len=512, dtype=dtype, device=device)
    outputs = engine.generate(held_out("repeat")[:4], SamplingParams(max_new_tokens=24, ignore_eos=True))
    stats = [output.stats for output in outputs]
    assert [s.accepted + s.rounds for s in stats] == [23] * 4
    at_least = {"none": 1.0, "ngram": 1.5, "eagle3": 1.5, "standalone": 3.0}[algorithm]
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
    rows = PagedBatch(zero, pages, zero, 10, num_valid=zero + 10, status=zero.clone())
    features = target.forward(tokens.int().to(device), positions, rows).features
    assert features is not None
    torch.testing.assert_close(features.cpu(), torch.cat(states[: len(layers)], -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, f"model: model_type is 'gpt2', expected one of {tuple(sorted(base._FAMILIES))}"),
        ("llama", {"head_dim": 272}, "model: head_dim is 272, expected at most 256"),
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
        Engine(folder, max_len=256, dtype=torch.float32, device="cpu", implementation="native")
    assert str(error.value) == message


# --- EAGLE-3 checkpoints


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return target_with_features((1, 2, 3))


def write_head(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """Write the tiny head with other tensors or config entries."""
    folder.mkdir()
    text = json.loads((tiny_model("eagle3") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_tensors() -> dict[str, torch.Tensor]:
    return load_file(tiny_model("eagle3") / "model.safetensors")


def load(folder: Path, target: CausalLM) -> object:
    return load_head(Eagle3Head, folder, target, num_pages=8, page_size=16)


def test_draft_vocabulary_maps_into_the_target(target: CausalLM) -> None:
    head = load_head(Eagle3Head, tiny_model("eagle3"), target, num_pages=8, page_size=16)
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
    head = load_head(Eagle3Head, write_head(tmp_path / "x", tensors), target, num_pages=8, page_size=16)
    torch.testing.assert_close(head.fc.weight, tiny_tensors()["fc.weight"].float())


def test_bin_files_are_unpickled_without_code(
    target: CausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_head(tmp_path / "x", tiny_tensors())
    (folder / "model.safetensors").unlink()
    torch.save(tiny_tensors(), folder / "pytorch_model.bin")
    load(folder, target)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("executed",)

    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be read, .*[Ww]eights.only"):
        load(folder, target)
    assert "executed" not in capsys.readouterr().out


def test_heads_that_do_not_fit_are_refused_by_name(target: CausalLM, tmp_path: Path) -> None:
    tensors = tiny_tensors()
    d2t = tensors["d2t"]
    count, end = itertools.count(), ", expected every tensor of the head and no other"

    def refusal(tensors: dict[str, torch.Tensor], **config: object) -> str:
        folder = write_head(tmp_path / str(next(count)), tensors, **config)
        with pytest.raises(ValueError) as error:
            load(folder, target)
        return str(error.value).replace(str(folder), "FOLDER")

    assert refusal({k: v for k, v in tensors.items() if k != "midlayer.mlp.up_proj.weight"}) == (
        f"EAGLE-3 head: FOLDER lacks midlayer.mlp.up_proj.weight{end}"
    )
    assert refusal(tensors | {"midlayer.self_attn.q_norm.weight": torch.ones(64)}) == (
        f"EAGLE-3 head: FOLDER lacks midlayer.self_attn.k_norm.weight{end}"
    )
    assert refusal(tensors | {"midlayer.self_attn.q_proj.bias": torch.ones(256)}) == (
        f"EAGLE-3 head: FOLDER lacks midlayer.self_attn.k_proj.bias, midlayer.self_attn.v_proj.bias{end}"
    )
    assert refusal(tensors | {"midlayer.gate.weight": torch.ones(64)}) == (
        f"EAGLE-3 head: FOLDER has midlayer.gate.weight, unknown to Eagle3Head{end}"
    )
    assert refusal(tensors | {"norm.weight": torch.ones(255)}) == (
        f"EAGLE-3 head: FOLDER has norm.weight of shape [255], expected [256]{end}"
    )
    assert refusal(tensors, num_attention_heads=0) == (
        "EAGLE-3 head: num_attention_heads is 0, expected a number from 1 on (FOLDER)"
    )
    assert refusal(tensors, norm_before_fc=True) == f"EAGLE-3 head: FOLDER lacks input_norm.weight{end}"
    assert refusal(tensors | {"input_norm.weight": torch.ones(768)}) == (
        "EAGLE-3 head: input_norm.weight is there, expected none without norm_before_fc in the config"
    )
    assert refusal(tensors, eagle_config={"norm_before_fc": True, "fc_norm": True}) == (
        "EAGLE-3 head: fc_norm is set with norm_before_fc, expected one of them"
    )
    assert refusal(tensors, parallel_drafting=True) == (
        "EAGLE-3 head: parallel_drafting is True, expected False (not supported)"
    )
    assert refusal(tensors, eagle_config={"use_aux_hidden_state": False}) == (
        "EAGLE-3 head: use_aux_hidden_state is False, expected True (not supported)"
    )
    assert refusal(tensors | {"layers.2.mlp.up_proj.weight": torch.ones(1)}) == (
        "EAGLE-3 head: FOLDER has layers.2, midlayer, expected layers from layers.0 on, none missing"
    )
    assert refusal(tensors, hidden_act="gelu") == "EAGLE-3 head: hidden_act is 'gelu', expected 'silu'"
    assert refusal(tensors, hidden_size=128) == (
        f"EAGLE-3 head: FOLDER lacks embed_tokens.weight and has fc.weight of shape [256, 768], expected [128, 768]{end}"
    )
    assert refusal(tensors, target_hidden_size=128) == (
        "EAGLE-3 head: target_hidden_size is 128, expected the target's 256"
    )
    assert refusal({k: v for k, v in tensors.items() if k != "d2t"}) == (
        "EAGLE-3 head: d2t is missing for a draft vocabulary of 1024, expected the tensor"
    )
    assert refusal(tensors | {"d2t": d2t[:-1]}) == (
        "EAGLE-3 head: d2t has shape [1023] and torch.int64, expected [1024] integers, one for each draft token"
    )
    beyond = d2t.clone()
    beyond[7] = 2048 - 7
    assert (
        refusal(tensors | {"d2t": beyond}) == "EAGLE-3 head: d2t leads to token 2048, expected 0 to 2047 (the target's)"
    )
    beyond[7] = -8
    assert (
        refusal(tensors | {"d2t": beyond}) == "EAGLE-3 head: d2t leads to token -1, expected 0 to 2047 (the target's)"
    )
    beyond[7] = d2t[8] + 1
    assert refusal(tensors | {"d2t": beyond}) == (
        "EAGLE-3 head: d2t leads to a token twice, expected another one for each draft token"
    )


def test_feature_layers_follow_the_config() -> None:
    """At the top of a config layers are named by what enters them, in `eagle_config` by what leaves them."""

    class Config:
        eagle_config: dict[str, object] | None = None
        eagle_aux_hidden_state_layer_ids: list[int] | None = None

    config = Config()
    assert feature_layers(config, 32) == (2, 16, 29)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert feature_layers(config, 4) == (1, 2, 3)
    config.eagle_aux_hidden_state_layer_ids = [0, 2, 4]
    assert feature_layers(config, 4) == (0, 2, 4)
    config.eagle_aux_hidden_state_layer_ids = None
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 9]}
    with pytest.raises(ValueError, match=r"EAGLE-3 head: feature layers are \(1, 10\), expected 0 to 4"):
        feature_layers(config, 4)


def test_a_limit_of_minus_one_is_none(tmp_path: Path) -> None:
    """For our parts as for those of transformers."""
    config = AutoConfig.for_model("llama", max_position_embeddings=-1)
    supported_family(config, 256)
    assert implementation_of(config, 256) == "native"
