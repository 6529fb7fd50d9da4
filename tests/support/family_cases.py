"""A small configuration of every native family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, set_seed

from support.random_checkpoints import EXPERTS

VOCAB = 200
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LOCAL: dict[str, Any] = {"sliding_window": 7, "layer_types": SLIDING}
ANGLES = {"rope_type": "default", "rope_theta": 1e4}
HALF = {"rope_parameters": ANGLES | {"partial_rotary_factor": 0.5}}

LONG = ANGLES | {
    "rope_type": "longrope", "original_max_position_embeddings": 128, "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [2.0] * 12,
}  # fmt: skip

TWO_KINDS = {"full_attention": ANGLES | {"rope_theta": 1e6}, "sliding_attention": ANGLES}
GEMMA = {"query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}

GRANITE = {
    "hidden_size": 256, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.05,
    "logits_scaling": 2.5,
}  # fmt: skip

STRETCHED = ANGLES | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ONE_MORE = ("gemma", "gemma2", "gemma3_text", "step3p5", "vaultgemma")  # norms multiply by 1 + weight

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 32": ("llama", {"head_dim": 32, "attention_bias": True}),
    "llama 80": ("llama", {"head_dim": 80, "hidden_act": "gelu"}),
    "llama 160": ("llama", {"head_dim": 160}),
    "qwen3 96": ("qwen3", {"head_dim": 96}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": (
        "gemma2",
        GEMMA | LOCAL | {"head_dim": 64, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", GEMMA | LOCAL | {"head_dim": 112, "rope_parameters": TWO_KINDS}),
    "phi3": ("phi3", {"hidden_size": 96, "sliding_window": 9}),
    "phi3 longrope": (
        "phi3",
        {"hidden_size": 96, "rope_parameters": LONG, "original_max_position_embeddings": 128},
    ),
    "phi4 mini": ("phi3", {"hidden_size": 256} | HALF),
    "olmo2": ("olmo2", {"hidden_size": 256}),
    "olmo2 32": ("olmo2", {"hidden_size": 128}),
    "olmo3": ("olmo3", LOCAL | {"hidden_size": 256}),
    "granite": ("granite", GRANITE),
    "smollm3": ("smollm3", {"hidden_size": 256, "no_rope_layers": [1, 0, 1, 0]}),
    "glm": ("glm", {"head_dim": 64, "attention_bias": True} | HALF),
    "glm4": ("glm4", {"head_dim": 128, "attention_bias": True} | HALF),
    "cohere": ("cohere", {"hidden_size": 256, "logit_scale": 0.3}),
    "cohere normed": ("cohere", {"hidden_size": 256, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", LOCAL | {"head_dim": 64, "logit_scale": 0.3}),
    "step3p5": (
        "step3p5",
        LOCAL
        | {
            "head_dim": 32,
            "num_sliding_attention_heads": 12,
            "rope_theta": [1e4, 1e6, 1e4, 1e6],
            "partial_rotary_factors": [1.0, 0.5, 1.0, 0.5],
            "moe_layers_enum": "1,2,3",
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.0, 0.0, 0.5, 0.7],
            "swiglu_limits_shared": [0.6, 0.0, 0.5, 0.7],
            "initializer_range": 0.15,
        },
    ),
    "starcoder2": ("starcoder2", {"hidden_size": 128, "sliding_window": 9, "hidden_act": "gelu_pytorch_tanh"}),
    "seed_oss": ("seed_oss", {"head_dim": 64, "attention_bias": True, "attention_out_bias": True}),
    "ministral": ("ministral", LOCAL | {"head_dim": 64}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 64,
            "rope_parameters": ANGLES | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16},
        },
    ),
    "arcee": ("arcee", {"head_dim": 64}),
    "nemotron": ("nemotron", {"head_dim": 64} | HALF),
    "helium": ("helium", {"hidden_size": 256, "head_dim": 64}),
    "ernie4_5": ("ernie4_5", {"head_dim": 64, "use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 64, "attention_bias": True}),
    "hunyuan 80": ("hunyuan_v1_dense", {"head_dim": 80, "rope_parameters": STRETCHED}),
    "exaone4": ("exaone4", LOCAL | {"head_dim": 64}),
    "exaone4 32": ("exaone4", {"hidden_size": 128, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 256, "rope_parameters": ANGLES | {"partial_rotary_factor": 0.25}}),
    "gpt_neox 80": ("gpt_neox", {"hidden_size": 320, "use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "gpt_neox 64": ("gpt_neox", {"hidden_size": 256, "rope_parameters": ANGLES, "attention_bias": False}),
    "gptj": ("gptj", {"rotary_dim": 16}),
    "gptj 96": ("gptj", {"hidden_size": 384, "rotary_dim": 24}),
    "codegen": ("codegen", {"hidden_size": 128, "num_attention_heads": 8, "rotary_dim": 8}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "window_size": 7}),
    "falcon": ("falcon", {"hidden_size": 256, "ffn_hidden_size": 96}),
    "falcon groups": ("falcon", {"hidden_size": 256, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon one norm": (
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon serial": ("falcon", {"num_kv_heads": 4, "multi_query": False, "parallel_attn": False, "bias": True}),
    "internlm3": ("internlm3", {"hidden_size": 256}),
    "iquestcoder": ("iquestcoder", {"hidden_size": 256}),
    "cwm": ("cwm", LOCAL | {"head_dim": 64, "rope_parameters": ANGLES, "bos_token_id": 1, "eos_token_id": 2}),
    "jais2": ("jais2", {"head_dim": 64, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": ("hyperclovax", GRANITE | {"head_dim": 64, "logits_scaling": 0.4}),
    "hyperclovax normed": ("hyperclovax", GRANITE | {"head_dim": 64, "use_post_norm": True}),
    "vaultgemma": (
        "vaultgemma",
        GEMMA | LOCAL | {"head_dim": 64, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "olmo": ("olmo", {"hidden_size": 256, "clip_qkv": 1.2}),
    "apertus": ("apertus", {"hidden_size": 256, "attention_bias": True}),
    "stablelm": ("stablelm", {"hidden_size": 256, "use_qkv_bias": True} | HALF),
    "stablelm parallel": ("stablelm", {"hidden_size": 128, "use_parallel_residual": True} | HALF),
    "stablelm normed": ("stablelm", {"hidden_size": 320, "qk_layernorm": True} | HALF),
    "phi normed": ("phi", {"hidden_size": 256, "qk_layernorm": True} | HALF),
    "phi": ("phi", {"hidden_size": 256} | HALF),
    "phi 80": ("phi", {"hidden_size": 320, "hidden_act": "gelu_new", "num_key_value_heads": 4} | HALF),
}


def random_module(case: str) -> Any:
    """Return a module without norms of 1 or biases of 0; its attention supports soft caps in every release."""
    # Wide weights magnify roundoff of sums, in experts beyond the tolerance.
    model_type, changes = CASES.get(case) or (case, EXPERTS[case] | {"initializer_range": 0.1})
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    options = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    set_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(options | changes)), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name:
            centre = 0.0 if name.endswith("bias") or model_type in ONE_MORE else 1.0
            parameter.data = centre + 0.3 * torch.randn_like(parameter)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.3)
    return model.eval()
