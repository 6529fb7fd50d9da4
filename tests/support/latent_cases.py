"""Small random targets with multi-head latent attention, one for each family of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, set_seed

from support.hybrid_cases import greedy_alone

VOCAB, COUNT = 200, 14
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
}  # fmt: skip

LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", EXPERTS | {"topk_method": "group_limited_greedy", "rope_parameters": YARN}),
    "deepseek_v2 lite": ("deepseek_v2", EXPERTS | {"topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3": ("deepseek_v3", EXPERTS | {"rope_parameters": YARN, "attention_bias": True}),
    "deepseek_v3 halves": ("deepseek_v3", EXPERTS | {"rope_interleave": False, "q_lora_rank": None}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        EXPERTS | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "minicpm3": ("minicpm3", {"scale_emb": 3.0, "dim_model_base": 32, "v_head_dim": None}),
    "youtu": ("youtu", {}),
    "axk1": ("axk1", EXPERTS),
    "longcat_flash": ("longcat_flash", EXPERTS | {"num_hidden_layers": 4, "num_layers": 2, "zero_expert_num": 4}),
    "kimi_linear": (
        "kimi_linear",
        EXPERTS | {
            "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 16, "num_experts": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
}  # fmt: skip


def latent_module(case: str, seed: int = 7, **changes: Any) -> Any:
    """Return a module in float32 without norms of 1."""
    model_type, sizes = LATENT[case]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    set_seed(seed)
    config = AutoConfig.for_model(model_type, **(SIZES | sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model.eval()


def prompts_of(vocab: int = VOCAB) -> list[list[int]]:
    """Return prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in (1, 7, 40, 19, 64, 3, 90, 16)]


@functools.cache
def module_of(case: str) -> Any:
    return latent_module(case)


@functools.cache
def texts_of(case: str) -> list[list[int]]:
    """Return the greedy texts of transformers."""
    return [greedy_alone(module_of(case), prompt, COUNT) for prompt in prompts_of()]
