"""Random checkpoints with MTP layers whose drafts other engines have recorded (tests/models/mtp_golden.json).

Weights are drawn from numpy's `RandomState`, whose numbers never change, by the tensors' names. This file runs within the
other engines too, so it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor

HIDDEN, VOCAB, STEPS = 128, 96, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
WIDTH = 64  # of MLPs and experts
TOKENS = [17, 3, 81, 44, 3, 9, 76, 50, 12, 90, 5]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
LATENT = {
    "num_key_value_heads": HEADS, "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FULL, SLIDING, SLIDING_HEADS = "full_attention", "sliding_attention", 6
STEP_TYPES = [FULL, SLIDING, *STEPS * [SLIDING]]  # vLLM has no MTP layer of the other type
# The published entries of a config, those for each layer with the MTP layers at the end.
STEP: dict[str, Any] = {
    "num_attention_groups": KV_HEADS, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": WIDTH,
    "share_expert_dim": WIDTH, "moe_layers_enum": "1", "moe_router_scaling_factor": 1.5, "sliding_window": 4,
    "use_head_wise_attn_gate": True, "attention_other_setting": {"num_attention_heads": SLIDING_HEADS},
    "layer_types": STEP_TYPES, "num_nextn_predict_layers": STEPS, "pad_token_id": 0,
    "rope_theta": [5e6 if each == FULL else 1e4 for each in STEP_TYPES],
    "partial_rotary_factors": [0.5 if each == FULL else 1.0 for each in STEP_TYPES],
    "yarn_only_types": [FULL], "rope_parameters": None,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class GoldenMtp:
    """A target with an MTP layer.

    Attributes:
        model_type: of the target.
        config: entries of its config beyond `SIZES`.
        layer: shapes of the MTP layer's tensors, by their names in a checkpoint.
        final_norm: name of the target's final norm.
        adds_one: norms multiply by 1 + weight.
        is_chain: there is a layer for each step, which reads the states of the one before.
    """

    model_type: str
    config: dict[str, Any]
    layer: Shapes
    final_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    adds_one: bool = False
    is_chain: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the MTP layer's tensors, and the target's that it shares."""
        shared = {
            f"{self.embedding}.weight": (VOCAB, HIDDEN),
            f"{self.final_norm}.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
        }
        return {name: self.drawn(name, shape) for name, shape in (shared | self.layer).items()}

    def drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        values = numbers(name, shape)
        if "norm" in name:
            return 0.3 * values if self.adds_one else 1 + 0.3 * values
        if len(shape) == 1:  # biases
            return 0.3 * values
        return 2 * values / shape[-1] ** 0.5

    @property
    def states(self) -> Tensor:
        """Return the target's states [tokens, HIDDEN] before its final norm."""
        return 2 * numbers("states", (len(TOKENS), HIDDEN))


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    drawn = numpy.random.RandomState(crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy(drawn.astype(numpy.float32))


def attention(
    prefix: str, *, heads: int = HEADS, queries: int = 1, head_norms: bool = False, biases: bool = False
) -> Shapes:
    """Return the shapes of an attention layer; `queries` is 2 with a gate for each query."""
    rows = {"q_proj": queries * heads, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
    shapes: Shapes = {f"{prefix}.{name}.weight": (count * HEAD_DIM, HIDDEN) for name, count in rows.items()}
    shapes[f"{prefix}.o_proj.weight"] = (HIDDEN, heads * HEAD_DIM)
    if head_norms:
        shapes |= {f"{prefix}.{name}.weight": (HEAD_DIM,) for name in ("q_norm", "k_norm")}
    if biases:
        shapes |= {f"{prefix}.{name}.bias": (count * HEAD_DIM,) for name, count in rows.items()}
    return shapes


def mlp(prefix: str, *names: str) -> Shapes:
    """Return the shapes of linears that lead to `WIDTH` elements, and of the one that leads back."""
    return {f"{prefix}.{name}.weight": (WIDTH, HIDDEN) for name in names} | {
        f"{prefix}.down_proj.weight": (HIDDEN, WIDTH)
    }


def gated_mlp(prefix: str) -> Shapes:
    return mlp(prefix, "gate_proj", "up_proj")


def vectors(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


def qwen() -> Iterator[Shapes]:
    """Yield the shapes of all that Qwen3-Next and Qwen3.5 have in common."""
    layer = "mtp.layers.0"
    yield vectors("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    yield {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    yield vectors(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    yield attention(f"{layer}.self_attn", queries=2, head_norms=True)


def qwen_experts(prefix: str, count: int) -> Iterator[Shapes]:
    yield from (gated_mlp(f"{prefix}.experts.{expert}") for expert in range(count))
    yield {f"{prefix}.gate.weight": (count, HIDDEN), f"{prefix}.shared_expert_gate.weight": (1, HIDDEN)}
    yield gated_mlp(f"{prefix}.shared_expert")


def mimo() -> Iterator[Shapes]:
    layer = "model.mtp_layers.0"
    yield vectors(*(f"{layer}.{name}_layernorm" for name in ("token", "hidden", "final", "input", "post_attention")))
    yield {f"{layer}.input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    yield attention(f"{layer}.self_attn", biases=True)
    yield gated_mlp(f"{layer}.mlp")


def ernie() -> Iterator[Shapes]:
    layer = "model.mtp_block.0"
    yield vectors("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0")
    yield {"model.mtp_linear_proj.0.weight": (HIDDEN, 2 * HIDDEN)}
    yield vectors(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    yield attention(f"{layer}.self_attn")
    yield gated_mlp(f"{layer}.mlp")


def nemotron(num_experts: int) -> Iterator[Shapes]:
    first, second = "mtp.layers.0", "mtp.layers.1"
    yield vectors(f"{first}.enorm", f"{first}.hnorm", f"{first}.norm", f"{second}.norm", f"{second}.final_layernorm")
    yield {f"{first}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    yield attention(f"{first}.mixer")
    yield {f"{second}.mixer.gate.weight": (num_experts, HIDDEN)}
    yield {f"{second}.mixer.gate.e_score_correction_bias": (num_experts,)}
    yield from (mlp(f"{second}.mixer.experts.{expert}", "up_proj") for expert in range(num_experts))
    yield mlp(f"{second}.mixer.shared_experts", "up_proj")


def latent(num_experts: int) -> Iterator[Shapes]:
    layer, heads = "model.layers.2", HEADS * (LATENT["qk_nope_head_dim"] + LATENT["v_head_dim"])
    queries = HEADS * (LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"])
    yield vectors(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "shared_head.norm")))
    yield vectors(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    yield {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    yield {f"{layer}.{name}.weight": (VOCAB, HIDDEN) for name in ("embed_tokens", "shared_head.head")}
    yield {
        f"{layer}.self_attn.q_a_proj.weight": (LATENT["q_lora_rank"], HIDDEN),
        f"{layer}.self_attn.q_a_layernorm.weight": (LATENT["q_lora_rank"],),
        f"{layer}.self_attn.q_b_proj.weight": (queries, LATENT["q_lora_rank"]),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"], HIDDEN),
        f"{layer}.self_attn.kv_a_layernorm.weight": (LATENT["kv_lora_rank"],),
        f"{layer}.self_attn.kv_b_proj.weight": (heads, LATENT["kv_lora_rank"]),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * LATENT["v_head_dim"]),
    }
    yield {f"{layer}.mlp.gate.weight": (num_experts, HIDDEN)}
    yield {f"{layer}.mlp.gate.e_score_correction_bias": (num_experts,)}
    yield from (gated_mlp(f"{layer}.mlp.experts.{expert}") for expert in range(num_experts))
    yield gated_mlp(f"{layer}.mlp.shared_experts")


def hunyuan(num_experts: int) -> Iterator[Shapes]:
    layer = "model.layers.2"
    yield vectors(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "final_layernorm")))
    yield vectors(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    yield {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    yield attention(f"{layer}.self_attn", head_norms=True)
    yield {f"{layer}.mlp.router.gate.weight": (num_experts, HIDDEN), f"{layer}.mlp.expert_bias": (num_experts,)}
    yield from (gated_mlp(f"{layer}.mlp.experts.{expert}") for expert in range(num_experts))
    yield gated_mlp(f"{layer}.mlp.shared_mlp")


def step() -> Iterator[Shapes]:
    """Yield the shapes of a chain of layers with sliding windows."""
    for layer in (f"model.layers.{index}" for index in range(2, 2 + STEPS)):
        yield vectors(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "transformer.shared_head.norm")))
        yield vectors(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
        yield {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
        yield {f"{layer}.transformer.shared_head.output.weight": (VOCAB, HIDDEN)}
        yield attention(f"{layer}.self_attn", heads=SLIDING_HEADS, head_norms=True)
        yield {f"{layer}.self_attn.g_proj.weight": (SLIDING_HEADS, HIDDEN)}
        yield gated_mlp(f"{layer}.mlp")


def joined(shapes: Iterator[Shapes]) -> Shapes:
    return {name: shape for each in shapes for name, shape in each.items()}


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH, "norm_topk_prob": True,
}  # fmt: skip

GOLDEN: dict[str, GoldenMtp] = {
    "qwen3_next": GoldenMtp(
        "qwen3_next",
        DELTA | EXPERTS,
        joined(qwen()) | joined(qwen_experts("mtp.layers.0.mlp", 4)),
        adds_one=True,
    ),
    "qwen3_5": GoldenMtp("qwen3_5_text", DELTA, joined(qwen()) | gated_mlp("mtp.layers.0.mlp"), adds_one=True),
    "qwen3_5_moe": GoldenMtp(
        "qwen3_5_moe_text",
        DELTA | EXPERTS,
        joined(qwen()) | joined(qwen_experts("mtp.layers.0.mlp", 4)),
        adds_one=True,
    ),
    "nemotron_h": GoldenMtp(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention"], "mtp_layers_block_type": ["full_attention", "moe"],
            "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": WIDTH,
            "moe_shared_expert_intermediate_size": WIDTH, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
            "norm_topk_prob": True, "layer_norm_epsilon": 1e-6, "num_nextn_predict_layers": 1,
        },
        joined(nemotron(4)),
        final_norm="backbone.norm_f",
        embedding="backbone.embeddings",
    ),
    "mimo": GoldenMtp("mimo", {"num_nextn_predict_layers": 1}, joined(mimo())),
    "ernie": GoldenMtp(
        "ernie4_5_moe",
        {
            "use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": WIDTH,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": 1,
            "num_nextn_predict_layers": 1,
        },
        joined(ernie()),
    ),
    "deepseek_v3": GoldenMtp(
        "deepseek_v3",
        LATENT | {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": WIDTH,
            "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1, "rope_parameters": YARN,
        },
        joined(latent(8)),
    ),
    "glm4_moe_lite": GoldenMtp(
        "glm4_moe_lite",
        LATENT | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": WIDTH,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        },
        joined(latent(4)),
    ),
    "hy_v3": GoldenMtp(
        "hy_v3",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": WIDTH,
            "expert_hidden_dim": WIDTH, "router_scaling_factor": 1.5, "route_norm": True, "qk_norm": True,
            "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True, "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse"], "num_nextn_predict_layers": 1,
        },
        joined(hunyuan(4)),
    ),
    "step3p5": GoldenMtp("step3p5", STEP, joined(step()), adds_one=True, is_chain=True),
}  # fmt: skip
