"""Small random checkpoints of every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

VOCAB = 199

WINDOWS: dict[str, Any] = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2}
GRANITE = {
    "hidden_size": 384, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.05,
    "logits_scaling": 2.5, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64,
}  # fmt: skip

# Sizes of experts, and the layers that have them.
EXPERTS: dict[str, dict[str, Any]] = {
    "afmoe": WINDOWS | {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 1,
        "num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True, "head_dim": 80,
    },
    "dots1": WINDOWS | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": 3,
    },
    "exaone_moe": WINDOWS | {
        "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    },
    "flex_olmo": {
        "num_experts": 6, "num_experts_per_tok": 2, "hidden_size": 384, "intermediate_size": 64, "pad_token_id": None,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 11, "intermediate_size": 64,
        "swiglu_limit": 1.5,
    },
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE | {"shared_intermediate_size": 48},
    "hunyuan_v1_moe": {
        "num_experts": 6, "moe_topk": 2, "intermediate_size": 64, "head_dim": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 100.0},
    },
    "hy_v3": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 1,
        "router_scaling_factor": 1.5,
    },
    "mellum": WINDOWS | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "minimax_m2": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {
        "num_experts": 6, "num_experts_per_tok": 2, "hidden_size": 384, "intermediate_size": 64, "clip_qkv": 1.2,
        "pad_token_id": None,
    },
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48, "head_dim": 64, "hidden_size": 384,
    },
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "solar_open": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
        "n_shared_experts": 1,
    },
}  # fmt: skip


def save_random_model(folder: Path, model_type: str, **changes: object) -> Path:
    """Save a random model with wide initial weights: its text does not loop, and its margins are no ties."""
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if model_type in ("qwen2", "mimo"):  # the head dimension is hidden / heads, whatever the config says
        options |= {"hidden_size": 384}
    if model_type == "mistral":
        options |= {"sliding_window": None}
    options |= EXPERTS.get(model_type, {})
    set_seed(7)
    config = AutoConfig.for_model(model_type, **(options | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def random_prompts(count: int) -> list[list[int]]:
    return [torch.randint(VOCAB, (length,)).tolist() for length in torch.randint(1, 60, (count,)).tolist()]
