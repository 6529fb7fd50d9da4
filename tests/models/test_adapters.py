"""Adapters merged at load: the text is that of a model with weights adapted by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_kernels.engine import Engine, Ngram, SamplingParams
from specdec_kernels.models.weights.adapters import merge_adapter
from specdec_kernels.tiny import tiny_model
from support.random_checkpoints import VOCAB, random_prompts, save_random_model
from support.tiny_checkpoint import greedy_by_transformers

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "init_lora_weights": True}
LAYER = "model.layers.1."
SIXTEEN = SamplingParams(max_new_tokens=16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "base", "llama")


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_adapter(folder: Path, base: Path | str | None, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Save an adapter in PEFT's layout."""
    folder.mkdir()
    values = LORA | {"base_model_name_or_path": base and str(base)} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def matrices(path: str, weight: Tensor, rank: int = 4) -> dict[str, Tensor]:
    """Return LoRA matrices of a linear [out, in], large enough to change texts."""
    out, width = weight.shape
    return {f"{path}.lora_A.weight": torch.randn(rank, width) / 8, f"{path}.lora_B.weight": torch.randn(out, rank)}


def weights_of(model: nn.Module, *names: str) -> dict[str, Tensor]:
    return {LAYER + name: model.get_submodule(LAYER + name).weight.data for name in names}


def expect_text_of(want: Any, *engines: Engine) -> None:
    prompts = random_prompts(4)
    texts = greedy_by_transformers(want, prompts, 16, eos_token_id=None)
    for engine in engines:
        assert [output.tokens for output in engine.generate(prompts, SIXTEEN)] == texts


@pytest.mark.parametrize("stabilised", [False, True])
def test_adapter_gives_text_of_adapted_model(stabilised: bool, base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    weights = weights_of(model, "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    tensors = {name: t for path, weight in weights.items() for name, t in matrices(path, weight).items()}
    before = greedy_by_transformers(model, random_prompts(4), 16, eos_token_id=None)
    for path, weight in weights.items():
        scale = 6 / math.sqrt(4) if stabilised else 6 / 4
        weight += scale * (tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"])
    assert greedy_by_transformers(model, random_prompts(4), 16, eos_token_id=None) != before
    adapter = save_adapter(tmp_path / "lora", base, tensors, use_rslora=stabilised)
    options = {"max_len": 128, "device": "cpu", "adaptive": False}
    torch.manual_seed(1)
    expect_text_of(model, Engine(base, adapter=adapter, **options), Engine(adapter, draft=Ngram(), **options))


def test_merge_adapter_applies_every_kind_of_tensor(base: Path, tmp_path: Path) -> None:
    """Ranks and alphas per module, DoRA magnitudes, an embedding, and a module saved in full."""
    want, got = loaded(base), loaded(base)
    weights = weights_of(want, "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj")
    (up, up_weight), (key, key_weight), (out, out_weight) = weights.items()
    tensors = matrices(up, up_weight, rank=2) | matrices(key, key_weight) | matrices(out, out_weight)
    magnitude = torch.rand(len(out_weight)) + 0.5
    embedding = want.model.embed_tokens.weight.data
    norm = torch.rand(embedding.shape[1])
    tensors |= {
        f"{out}.lora_magnitude_vector": magnitude,
        "model.embed_tokens.lora_embedding_A": torch.randn(4, VOCAB),
        "model.embed_tokens.lora_embedding_B": torch.randn(embedding.shape[1], 4),
        "model.norm.weight": norm,
    }

    def product(path: str, first: str = "lora_B.weight", second: str = "lora_A.weight") -> Tensor:
        return (tensors[f"{path}.{first}"].double() @ tensors[f"{path}.{second}"].double()).float()

    up_weight += 6 / 2 * product(up)
    key_weight += 10 / 4 * product(key)
    total = out_weight + 6 / 4 * product(out)
    out_weight.copy_(magnitude[:, None] * total / total.norm(dim=1, keepdim=True))
    embedding += 6 / 4 * product("model.embed_tokens", "lora_embedding_B", "lora_embedding_A").t()
    want.model.norm.weight.data.copy_(norm)

    patterns = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.k_proj": 10}}
    merge_adapter(
        got, save_adapter(tmp_path / "lora", base, tensors, modules_to_save=["norm"], use_dora=True, **patterns)
    )
    for (name, one), other in zip(want.named_parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4, msg=name)


def test_merge_adapter_rounds_16_bit_weights_once(base: Path, tmp_path: Path) -> None:
    model = loaded(base).bfloat16()
    ((path, weight),) = weights_of(model, "mlp.gate_proj").items()
    tensors = matrices(path, weight)
    want = weight.float() + 1.5 * (tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"])
    merge_adapter(model, save_adapter(tmp_path / "lora", base, tensors))
    assert ((weight.float() - want).abs() <= want.abs() * 2**-8).all()


def test_engine_prefers_tokenizer_of_adapter(base: Path, tmp_path: Path) -> None:
    (path, weight), *_ = weights_of(loaded(tiny_model("target")), "mlp.up_proj").items()
    adapter = save_adapter(tmp_path / "lora", tiny_model("target"), matrices(path, weight))
    AutoTokenizer.from_pretrained(tiny_model("target"), chat_template="one").save_pretrained(adapter)
    assert Engine(adapter, max_len=64, device="cpu").tokenizer.chat_template == "one"


# --- refusals


def q_proj(model: nn.Module) -> dict[str, Tensor]:
    ((path, weight),) = weights_of(model, "self_attn.q_proj").items()
    return matrices(path, weight)


def without_b(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in q_proj(model).items() if "lora_A" in name}


def of_another_width(model: nn.Module) -> dict[str, Tensor]:
    return matrices(LAYER + "self_attn.q_proj", torch.empty(384, 95))


def nowhere(model: nn.Module) -> dict[str, Tensor]:
    return matrices("model.layers.9.mlp.up_proj", torch.empty(3, 4))


def of_a_norm(model: nn.Module) -> dict[str, Tensor]:
    return matrices("model.norm", torch.empty(96, 96))


def with_more(model: nn.Module) -> dict[str, Tensor]:
    return q_proj(model) | {"model.norm.weight": torch.ones(96)}


Q = LAYER + "self_attn.q_proj"
REFUSED: dict[str, tuple[Callable[[Any], dict[str, Tensor]], dict[str, Any], str]] = {
    "another method": (q_proj, {"peft_type": "LOHA"}, "has peft_type 'LOHA', expected 'LORA'"),
    "biases": (q_proj, {"bias": "all"}, "has bias 'all', expected 'none'"),
    "a changed base": (
        q_proj,
        {"init_lora_weights": "pissa"},
        "has init_lora_weights 'pissa', which changes the base model's weights, expected an adapter to the base model "
        "as it is (PEFT converts one when it is saved)",
    ),
    "repeated layers": (q_proj, {"layer_replication": [[0, 2]]}, "sets layer_replication, expected a LoRA without it"),
    "no rank": (q_proj, {"r": None}, "has r None, expected a number"),
    "another rank": (q_proj, {"r": 8}, f"has {Q} of ranks 4 and 4, expected 8 as its config says"),
    "half a module": (without_b, {}, f"lacks {Q}.lora_B, expected both matrices of a module"),
    "another width": (of_another_width, {}, f"has {Q} of shape [384, 95], expected [384, 96]"),
    "another model": (nowhere, {}, "has model.layers.9.mlp.up_proj, which LlamaForCausalLM does not have"),
    "a norm": (of_a_norm, {}, "adapts model.norm, a LlamaRMSNorm, expected a linear module or an embedding"),
    "a tensor more": (with_more, {}, "has model.norm.weight, expected tensors of LoRA or of modules_to_save alone"),
    "nothing": (lambda model: {}, {}, "has no tensors, expected some"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_merge_adapter_refuses_inexact_merges(kind: str, base: Path, tmp_path: Path) -> None:
    tensors, config, words = REFUSED[kind]
    model = loaded(base)
    adapter = save_adapter(tmp_path / "lora", base, tensors(model), **config)
    with pytest.raises(ValueError) as error:
        merge_adapter(model, adapter)
    assert str(error.value) == f"adapter: {adapter} {words}"


def test_merge_adapter_refuses_tied_weights(tmp_path: Path) -> None:
    base = save_random_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    head = matrices("lm_head", torch.empty(VOCAB, 96))
    adapter = save_adapter(tmp_path / "lora", base, head)
    with pytest.raises(ValueError) as error:
        Engine(adapter, max_len=64, device="cpu")
    assert str(error.value) == (
        f"adapter: {adapter} changes lm_head, expected a weight of its own "
        "(model.embed_tokens.weight and lm_head.weight are one)"
    )


def test_engine_refuses_adapter_without_base_model(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "lora", None, q_proj(loaded(base)))

    def refusal(model: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as error:
            Engine(model, max_len=64, device="cpu", **options)
        return str(error.value)

    assert refusal(loaded(base), adapter=adapter) == (
        "adapter: it is given with a LlamaForCausalLM, expected the path or hub id of its base model "
        "(merge_and_unload() of PEFT merges it into a module)"
    )
    assert refusal(adapter, adapter=adapter) == (
        f"adapter: it is given with {adapter}, which is an adapter, too, expected its base model"
    )
    assert refusal(adapter) == (
        f"adapter: {adapter} names no base model, expected base_model_name_or_path, or adapter= with it"
    )
    assert refusal(base, adapter=base) == (
        f"adapter: {base} has no adapter_config.json, expected a folder as PEFT saves it"
    )
    with pytest.raises(
        FileNotFoundError, match=r"^Engine: adapter is /nowhere, expected an existing folder or a hub id"
    ):
        Engine(base, adapter="/nowhere", max_len=64, device="cpu")
    (adapter / "adapter_model.safetensors").rename(adapter / "other.safetensors")
    assert refusal(base, adapter=adapter) == (
        f"adapter: {adapter} has no weights, expected one of adapter_model.safetensors, adapter_model.bin"
    )


def test_merge_adapter_reads_pickled_weights(base: Path, tmp_path: Path) -> None:
    want, got = loaded(base), loaded(base)
    adapter = save_adapter(tmp_path / "lora", base, q_proj(want))
    merge_adapter(want, adapter)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    merge_adapter(got, adapter)
    assert torch.equal(got.get_submodule(Q).weight, want.get_submodule(Q).weight)
    assert not torch.equal(got.get_submodule(Q).weight, loaded(base).get_submodule(Q).weight)
