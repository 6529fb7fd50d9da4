"""Small random checkpoints of every supported architecture."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

VOCAB = 199

# Of which layers have experts, and how many.
EXPERTS: dict[str, dict[str, object]] = {
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 11, "intermediate_size": 64,
        "swiglu_limit": 1.5,
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
}  # fmt: skip


def save_random_model(folder: Path, model_type: str, **changes: object) -> Path:
    """A random model of two layers; wide initial weights, so that its text is no loop and its margins are no ties."""
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
    if model_type == "qwen2":  # its head dimension is hidden / heads, whatever the config says
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
