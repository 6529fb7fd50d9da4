"""Multimodal models on text: their text decoder by our layers, against their own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_kernels import hf
from specdec_kernels.engine import Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.backends.select import implementation_of
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.model_config import PLAIN_TEXT_DECODERS, config_of
from support.tiny_random_models import PREFIXES, VOCAB, published, tiny_model

GEMMA3 = {
    "query_pre_attn_scalar": 20, "final_logit_softcapping": 2.0, "sliding_window": 7, "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
COHERE2 = {"logit_scale": 0.3, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}

GROWING = {
    "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip

# Soft caps and scales of logits are those that a language model alone would have, and this one has not.
CHANGES: dict[str, dict[str, Any]] = {
    "aya_vision": COHERE2,
    "cohere2_vision": COHERE2,
    "gemma3": GEMMA3,
    "qwen2_5_vl": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
    "qwen3_vl_moe": {"mlp_only_layers": [1]},
}
# Language models that others than the common one stand in for.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava of mistral": ("llava", {"model_type": "mistral", "sliding_window": 7}),
    "llava_next of granite": ("llava_next", {"model_type": "granite", "logits_scaling": 2.0, "attention_multiplier": 0.2}),
    "mistral3 of ministral3": ("mistral3", {"model_type": "ministral3", "rope_parameters": GROWING}),
    "internvl of qwen3": ("internvl", {"model_type": "qwen3"}),
}  # fmt: skip
CASES = {name: (name, CHANGES.get(name, {})) for name in PLAIN_TEXT_DECODERS} | OTHERS


def tiny(case: str, seed: int = 0) -> Any:
    model_type, changes = CASES[case]
    return tiny_model(model_type, seed, **({"hidden_size": 128, "head_dim": 32} | changes))


def int32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_those_of_the_module(case: str, device: torch.device) -> None:
    """Return logits of a prompt, and of two tokens after it that do not see each other."""
    module = tiny(case)
    assert implementation_of(config_of(module), 64) == "native"
    text, ends = torch.randint(20, VOCAB, (30,)).tolist(), [7, 9]
    wants = [module(input_ids=torch.tensor([[*text, end]])).logits[0] for end in ends]
    lm = CausalLM(module, ModelOptions(max_len=64, num_pages=4, page_size=16, dtype=torch.float32, device=device))
    table, zero = int32([[2, 0, 3, 1]], device), int32([0], device)
    prompt = lm.forward(
        int32([text], device), int32([list(range(30))], device), PagedBatch(zero, table, zero, tail_len=30)
    )
    mask = torch.tensor([[[1], [2]]], device=device)
    tree = PagedBatch(zero, table, int32([30], device), tail_len=2, mask=mask)
    leaves = lm.forward(int32([ends], device), int32([[30, 30]], device), tree)
    for i, want in enumerate(wants):
        logits = torch.cat([lm.logits(prompt.hidden)[0], lm.logits(leaves.hidden)[0, i : i + 1]]).cpu()
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def own_text(model: Any, prompt: list[int], count: int, **more: Any) -> list[int]:
    text = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | more
    out: list[int] = model.generate(input_ids=text, attention_mask=torch.ones_like(text), **options)[0].tolist()
    return out[len(prompt) :]


@pytest.mark.parametrize("case", PREFIXES)
def test_checkpoints_load_under_the_names_that_they_have(case: str, tmp_path: Path, device: torch.device) -> None:
    module = tiny(case)
    module.save_pretrained(tmp_path)
    tensors = {published(name, case): tensor.clone() for name, tensor in module.state_dict().items()}
    assert any(name.startswith(PREFIXES[case]) for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = torch.randint(20, VOCAB, (19,)).tolist()
    want = own_text(module, prompt, 10)
    options: dict[str, Any] = {"max_len": 64, "num_slots": 2, "dtype": torch.float32, "device": device}
    for draft in (None, Ngram(num_nodes=8), Standalone(tmp_path, num_steps=3, topk=2, num_nodes=6)):
        with Engine(tmp_path, draft=draft, adaptive=False, **options) as engine:
            assert engine.config.implementation == "native"
            assert isinstance(engine.target, CausalLM)
            output = engine.generate(prompt, SamplingParams(10, ignore_eos=True))[0]
            assert list(output.tokens) == want
            # Modules of other modalities take no memory.
            numbers = sum(parameter.numel() for parameter in engine.target.model.parameters())
            of_text = {p for part in (module.get_decoder(), module.lm_head) for p in part.parameters()}
            assert numbers == sum(parameter.numel() for parameter in of_text)
    assert output.stats.accept_length > 2


@pytest.mark.parametrize("case", ["llava", "qwen2_5_vl"])
def test_loop_of_transformers(case: str, device: torch.device) -> None:
    module = tiny(case)
    prompt = torch.randint(20, VOCAB, (19,)).tolist()
    want = own_text(module, prompt, 10)
    assert own_text(module.to(device), prompt, 10, custom_generate=hf.generate) == want
    hf.release(module)


def test_tokens_of_other_senses_are_refused(device: torch.device) -> None:
    module = tiny("llava")
    module.config.image_token_id = 31
    with (
        Engine(module, max_len=64, dtype=torch.float32, device=device) as engine,
        pytest.raises(ValueError) as error,
    ):
        engine.generate([[1, 2], [5, 31, 6]])
    assert str(error.value) == "generate: prompts[1] has token 31, the model's image_token_id, expected text alone"


def test_what_does_more_to_text_keeps_its_own_modules() -> None:
    """PaliGemma counts positions from 1."""
    config = config_of(tiny_model("paligemma"))
    assert implementation_of(config, 64) == "transformers"
    with pytest.raises(ValueError, match=r"^model: model_type is 'paligemma', expected one of"):
        implementation_of(config, 64, "native")


def test_dtype_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Which older checkpoints say of the whole alone."""
    tiny("llava").half().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"].pop("dtype", None)
    values["vision_config"].pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert config_of(tmp_path).dtype == torch.float16
