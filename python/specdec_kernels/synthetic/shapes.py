"""Shapes of well-known models as Hugging Face configs, without any download."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from ..models.families.step3p5 import Step3p5Config
from .names import SHAPES as SHAPES

FULL, SLIDING = "full_attention", "sliding_attention"

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

STEP: dict[str, Any] = {
    "sliding_window": 512,
    "num_nextn_predict_layers": 3,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
    "yarn_only_types": [FULL],
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
STEP_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 2.0,
    "original_max_position_embeddings": 131072,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
}
LAST_STEP_LAYERS = 43, 44  # whose SwiGLU has a limit


def step_config(*, num_hidden_layers: int, **values: Any) -> Step3p5Config:
    """Return a config of Step-3.5: every fourth layer attends to all rows, the first three have no experts."""
    types = [SLIDING if layer % 4 else FULL for layer in range(num_hidden_layers)]
    types += values["num_nextn_predict_layers"] * [SLIDING]
    clamped = [layer in LAST_STEP_LAYERS for layer in range(len(types))]
    of_layers: dict[str, Any] = {
        "layer_types": types,
        "rope_theta": [5e6 if each == FULL else 1e4 for each in types],
        "partial_rotary_factors": [0.5 if each == FULL else 1.0 for each in types],
        "swiglu_limits": [7.0 * each for each in clamped],
        "swiglu_limits_shared": [16.0 * each for each in clamped],
    }
    return Step3p5Config(num_hidden_layers=num_hidden_layers, **(values | of_layers))


_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-8b": (
        Qwen3Config,
        QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    # 64 layers are 66 GB.
    "qwen3-32b": (
        Qwen3Config,
        QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig,
        QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    # Three of four layers are gated delta nets.
    "qwen3.5-27b": (
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3-next-80b-a3b": (
        "qwen3_next",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    # As a config of DeepSeek-V3, for which engines know MTP layers. 27 layers are 31 GB: "deepseek-v2-lite:22" has 28.
    "deepseek-v2-lite": (
        "deepseek_v3",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    # 47 layers are 60 GB: "glm-4.7-flash:20" has 26.
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    # A layer with experts is 9 GB: "step-3.5-flash:9" has 65, its MTP layers included.
    "step-3.5-flash": (
        step_config,
        STEP
        | {
            "vocab_size": 128896,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_attention_groups": 8,
            "head_dim": 128,
            "attention_other_setting": {
                "attention_type": SLIDING,
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_router_scaling_factor": 3.0,
            "max_position_embeddings": 262144,
            "rope_scaling": STEP_SCALING,
        },
    ),
    "llama-3.1-8b": (
        LlamaConfig,
        LLAMA3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    # 80 layers are 141 GB: "llama-3.3-70b:36" has 66.
    "llama-3.3-70b": (
        LlamaConfig,
        LLAMA3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "tiny-hybrid": (
        "qwen3_5_text",
        {
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "tiny-latent": (
        "deepseek_v3",
        {
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "tiny-step": (
        step_config,
        STEP
        | {
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_attention_groups": 2,
            "head_dim": 64,
            "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 4},
            "sliding_window": 24,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_intermediate_size": 64,
            "share_expert_dim": 64,
            "max_position_embeddings": 4096,
            "rope_scaling": STEP_SCALING | {"original_max_position_embeddings": 2048},
        },
    ),
    "tiny": (
        Qwen3Config,
        {
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def shape_config(name: str, num_layers: int | None = None) -> Any:
    """Return a new config of the shape, optionally with `num_layers`; untied embeddings, no end-of-text token.

    The name may have the number of layers after a colon, too.
    """
    name, _, layers = name.partition(":")
    kind, values = _CONFIGS[name]
    if num_layers is not None or layers:
        values = values | {"num_hidden_layers": num_layers or int(layers)}
    values = values | {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(kind, **values) if isinstance(kind, str) else kind(**values)


def full_attention_of(config: Any) -> Any:
    """Return the config; where kinds of layers have other heads, that of those which attend to all rows."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    alike = config.per_layer_config[FULL]
    alike.rope_parameters = config.rope_parameters[FULL]
    return alike


def draft_vocab_of(config: Any) -> int:
    """Return the size of a head's draft vocabulary: 32000, like published heads, or half of a small vocabulary."""
    vocab: int = config.vocab_size
    return min(32000, vocab // 2)
