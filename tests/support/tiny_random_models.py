"""Tiny random checkpoints of every model type of transformers: small sizes, none of them 1 or 0 by chance."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 160
WINDOW = 8
LAYERS = 4

# Sizes by their names in configs of transformers. Only names that a config has are set.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "shape_vocab_size": VOCAB,
    "pronunciation_vocab_size": VOCAB,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "out_hidden_size": 64,
    "alignment_intermediate_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "hidden_size_global": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "adapter_in_dim": 64,
    "adapter_out_dim": 64,
    "adapter_input_size": 64,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "dropout": 0.0,
    "depth": 2,
    "embed_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


# Types without a tiny model, and the reason.
NO_SMALL = {
    "gemma3n": "its vision part wants the package timm",
    "gemma4_assistant": "it reads the keys and values of another model",
    "gemma4_unified_assistant": "it reads the keys and values of another model",
    "musicgen": "transformers makes no language model of the whole config",
    "musicgen_melody": "transformers makes no language model of the whole config",
}

# Full-attention layers have larger heads than sliding-window layers.
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    "final_logit_softcapping": 500.0,
}

# Pairs of a head that rotate by each of a token's three positions, for heads of any size.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
ANGLES = {"rope_type": "default", "rope_theta": 1e4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "ngram_vocab_size_base": 100, "split_ngram_parts": 1,
}  # fmt: skip
DOTS3 = {
    "num_key_value_heads": 4,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {i: {"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8} for i in (1, 3)},
}

# Sizes of single types, set within `text_config` if there is one.
MORE: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 500.0},
    "falcon": {"num_kv_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "kimi_linear": {
        "num_key_value_heads": 4, "num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": DOTS3,
    "dots3_note_text": DOTS3,
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "key_multiplier": 0.7, "ssm_out_multiplier": 0.8},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_5": DELTA | MROPE,
    "qwen3_5_moe": DELTA | MROPE,
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 16},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.3,
        "rope_parameters": {"sliding_attention": ANGLES | {"mrope_section": [4, 2, 2]}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "longcat_flash": {"num_key_value_heads": 4},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False, "attention_head_size": 16, "attn_layers": ["local", "lsh"] * 2},
    "xlm": {"causal": True},
    "xlnet": {"d_head": 16, "d_inner": 64},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_key_value_heads": 4,
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "attention_hidden_size": 128,
        "attention_head_dim": 32, "head_dim": 32, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gemma4_unified": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2_vl": MROPE,
    "qwen2_5_vl": MROPE,
    "qwen3_vl": MROPE,
    "qwen3_vl_moe": MROPE,
}  # fmt: skip


def tiny_config(model_type: str, /, **more: Any) -> Any:
    """Return the config of a model of this type with small sizes."""
    values = shrunk(CONFIG_MAPPING[model_type]().to_dict())
    changes = MORE.get(model_type, {}) | more
    if isinstance(getattr(CONFIG_MAPPING[model_type], "head_dim", None), property):
        changes.pop("head_dim", None)  # follows from other sizes
    part = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    part.update(changes)
    if "mrope_section" in (part.get("rope_parameters") or {}):
        pairs = part.get("head_dim", part["hidden_size"] // part["num_attention_heads"]) // 2
        sections = [pairs // 4, pairs * 3 // 8, pairs * 3 // 8]
        part["rope_parameters"] = part["rope_parameters"] | {"mrope_section": sections}
    return AutoConfig.for_model(model_type, **{key: value for key, value in values.items() if key != "model_type"})


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with known sizes made small and per-layer lists cut."""
    count = next((values[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if values.get(name)), None)
    small = {}
    for name, value in values.items():
        if name in ("transformers_version", "architectures", "dtype", "_name_or_path"):
            continue
        if name == "head_dim" and "qk_rope_head_dim" in values:
            value = SIZES["qk_rope_head_dim"]
        elif name in SIZES and (value is not None or name == "pad_token_id"):
            value = SIZES[name]
        elif name == "per_layer_config" and isinstance(value, dict):
            value = {layer: shrunk(part) for layer, part in value.items() if int(layer) < LAYERS}
        elif name.endswith("_config") and isinstance(value, dict):
            value = shrunk(value)
        elif isinstance(value, list) and count and len(value) == count:
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
            value = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif name == "is_decoder":
            value = True
        small[name] = value
    return small


def randomise(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                norm = "norm" in name or "ln" in name
                parameter.copy_((1.0 if norm and name.endswith("weight") else 0.0) + 0.3 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def tiny_model(model_type: str, /, seed: int = 0, **more: Any) -> Any:
    config = tiny_config(model_type, **more)
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    model = kind.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    return model.eval().requires_grad_(False)


# Prefixes in published checkpoints of the tensors that transformers calls `model.language_model.`
PREFIXES = {
    "gemma3": "language_model.model.",
    "mistral3": "language_model.model.",
    "llava": "language_model.model.",
    "qwen2_vl": "model.",
    "qwen2_5_vl": "model.",
    "qwen3_vl": "model.language_model.",
    "internvl": "language_model.model.",
}


def published(name: str, model_type: str) -> str:
    """Return the name in published checkpoints of a tensor of transformers, for a type of PREFIXES."""
    prefix = PREFIXES[model_type]
    if prefix == "language_model.model.":
        name = name.removeprefix("model.").replace("lm_head.", "language_model.lm_head.")
        return re.sub(r"^language_model\.(?!lm_head)", prefix, name)
    if prefix == "model.":
        return name.replace("model.visual.", "visual.").replace("model.language_model.", prefix)
    return name


# Native families: head dimensions of our kernels.
NATIVE = {"hidden_size": 256, "head_dim": 64}
ROWS = {"qk_rope_head_dim": 16, "head_dim": 16}  # of `mla_tree_attention`
NATIVE_OF = {  # and of these types
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "minicpm3", "youtu"), ROWS),
    "longcat_flash": ROWS | {"qk_head_dim": 32},
    "bamba": {"mamba_n_heads": 32},
    "granitemoehybrid": {"mamba_n_heads": 32},
    "zamba2": {"mamba_headdim": 64, "attention_hidden_size": 512, "attention_head_dim": 128, "head_dim": 128},
}
