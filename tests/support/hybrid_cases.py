"""Small random targets with recurrent layers, one for each family of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, set_seed

VOCAB = 200
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ANGLES = {"rope_type": "default", "rope_theta": 1e4}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "head_dim": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2}
GRANITE = MAMBA | {
    "layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.1, "logits_scaling": 2.5,
}  # fmt: skip
FALCON = MAMBA | {
    "mamba_d_ssm": 128, "key_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2, "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 1.1], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
    "num_hidden_layers": 5, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
    "ssm_state_size": 10, "n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 5,
    "num_key_value_heads": 4, "time_step_min": 1e-6, "num_mem_blocks": 2, "mamba_d_state": 12, "n_mamba_heads": 8, "mamba_ngroups": 2, "adapter_rank": 6,
}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention"] * 2}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | EXPERTS),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1, 3]}),
    "bamba recurrent last": ("bamba", MAMBA | {"attn_layer_indices": [0, 2], "mamba_proj_bias": True}),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1 normed": ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1 normed first": ("falcon_h1", FALCON | {"mamba_rms_norm": True}),
    "granitemoehybrid": ("granitemoehybrid", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid dense": (
        "granitemoehybrid", GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h latent": (
        "nemotron_h",
        NEMOTRON | {"moe_latent_size": 24, "layers_block_type": ["moe", "full_attention", "mlp", "linear_attention", "mlp"]},
    ),
    "zamba2": ("zamba2", ZAMBA),
    "zamba2 adapters": ("zamba2", ZAMBA | {"use_shared_attention_adapter": True, "use_mem_rope": True}),
    "lfm2": ("lfm2", CONV),
    "lfm2 bias": ("lfm2", CONV | {"conv_bias": True, "conv_L_cache": 4}),
    "lfm2_moe": (
        "lfm2_moe",
        CONV | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
}  # fmt: skip


def hybrid_module(case: str, seed: int = 7, **changes: Any) -> Any:
    """Return a module in float32 without norms of 1 or biases of 0."""
    model_type, sizes = HYBRIDS[case]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    set_seed(seed)
    config = AutoConfig.for_model(model_type, **(SIZES | sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("A_log"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(std=0.3)
    return model.eval()


def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the text of transformers' `generate`."""
    tokens = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    text: list[int] = out[0, len(prompt) :].tolist()
    return text
