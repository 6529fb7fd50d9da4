"""Small random checkpoints of Step-3.5, with configs and tensors as StepFun publishes them, and a chain of MTP layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

NUM_LAYERS, WINDOW = 2, 5
FULL, SLIDING = "full_attention", "sliding_attention"
# Entries of the config for a layer each, those of MTP layers at the end.
TYPES, MTP_TYPES = [FULL, SLIDING], [SLIDING, FULL, SLIDING]
STEP: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 199, "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_attention_groups": 2,
    "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "sliding_window": WINDOW, "use_head_wise_attn_gate": True,
    "attention_other_setting": {
        "attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 64,
    },
    "moe_num_experts": 6, "moe_top_k": 2, "moe_intermediate_size": 64, "share_expert_dim": 48, "moe_layers_enum": "1",
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 1.5, "norm_expert_weight": True,
    "use_moe_router_bias": True, "need_fp32_gate": True, "zero_centered": True, "yarn_only_types": [FULL],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
}  # fmt: skip


def of_layers(types: list[str], limits: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the entries of a config that have a value for each layer."""
    return {
        "layer_types": types,
        "rope_theta": [5e6 if each == FULL else 1e4 for each in types],
        "partial_rotary_factors": [0.5 if each == FULL else 1.0 for each in types],
        "swiglu_limits": [limit for limit, _ in limits],
        "swiglu_limits_shared": [limit for _, limit in limits],
    }


LIMITS = [(0.0, 0.7), (0.5, 0.9)]  # of routed experts, and of dense MLPs and shared experts; 0: none


def longer_module(num_mtp_layers: int, **changes: Any) -> Any:
    """Return a random module whose layers after NUM_LAYERS are the decoder layers of MTP layers."""
    types, limits = TYPES + MTP_TYPES[:num_mtp_layers], LIMITS + [(0.0, 0.0)] * num_mtp_layers
    set_seed(7)
    config = AutoConfig.for_model(**(STEP | changes | of_layers(types, limits) | {"num_hidden_layers": len(types)}))
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, tensor in module.state_dict().items():
        if name.endswith("norm.weight"):
            tensor.uniform_(-0.5, 0.5)
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.3)
    return module.eval()


def mtp_parts(num_mtp_layers: int, hidden: int = STEP["hidden_size"]) -> dict[str, Tensor]:
    """Return the tensors of MTP layers that no decoder layer has."""
    vocab = STEP["vocab_size"]
    torch.manual_seed(6)
    parts: dict[str, Tensor] = {}
    for layer in range(NUM_LAYERS, NUM_LAYERS + num_mtp_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
            parts[f"{prefix}{norm}.weight"] = torch.rand(hidden) - 0.5
        parts[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
        parts[f"{prefix}transformer.shared_head.output.weight"] = torch.randn(vocab, hidden) / 3
    return parts


def write_step(folder: Path, num_mtp_layers: int, **changes: Any) -> Path:
    """Write a target of NUM_LAYERS layers with a chain of MTP layers, with these changes of STEP."""
    longer_module(num_mtp_layers, **changes).save_pretrained(folder)
    file, values = folder / "model.safetensors", STEP | changes
    save_file(load_file(file) | mtp_parts(num_mtp_layers, values["hidden_size"]), file, {"format": "pt"})
    types, limits = TYPES + MTP_TYPES[:num_mtp_layers], LIMITS + [(0.0, 0.0)] * num_mtp_layers
    values |= of_layers(types, limits) | {"num_nextn_predict_layers": num_mtp_layers}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


class StepReference:
    """The chain of MTP layers by the published forward pass, over a whole text at once.

    Row i of layer m pairs token i + m + 1 with row i of layer m - 1 before its norm, row i of layer 0 with the target's
    state before its final norm. The decoder layers are transformers' own.

    Source: step3p5_mtp.py of vLLM 0.33 and of SGLang 0.5.23, which agree.
    """

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.longer, self.parts = longer_module(num_layers), mtp_parts(num_layers)

    def normed(self, norm: str, x: Tensor) -> Tensor:
        eps: float = STEP["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.parts[norm])

    def layer(self, index: int, tokens: list[int], states: Tensor) -> Tensor:
        """Return the states [T, H] of layer NUM_LAYERS + `index` for tokens and states [T, H] of the one before."""
        prefix, kind = f"model.layers.{NUM_LAYERS + index}.", MTP_TYPES[index]
        embedded = self.normed(f"{prefix}enorm.weight", self.target.model.embed_tokens.weight[tokens])
        pairs = torch.cat([embedded, self.normed(f"{prefix}hnorm.weight", states)], -1)
        x, rows = (pairs @ self.parts[f"{prefix}eh_proj.weight"].T)[None], torch.arange(len(tokens))
        distances = rows[:, None] - rows
        hidden = (distances < 0) | ((distances >= WINDOW) & (kind == SLIDING))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
        rotations = self.longer.model.rotary_emb(x, rows[None], kind)
        block = self.longer.model.layers[NUM_LAYERS + index]
        out: Tensor = block(x, attention_mask=mask, position_ids=rows[None], position_embeddings=rotations)[0]
        return out

    @torch.inference_mode()
    def chain(self, text: list[int], steps: int, given: list[int] | None = None) -> tuple[list[int], Tensor]:
        """Return the likeliest chain after a text, or after its `given` first nodes, and its logits [steps, V]."""
        captured: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0][0, :-1]))
        self.target.model(torch.tensor([text]), use_cache=False)
        hook.remove()
        [states] = captured
        tokens, logits, nodes = list(text), [], given or []
        for index in range(steps):
            states, head = self.layer(index, tokens[index + 1 :], states), f"model.layers.{NUM_LAYERS + index}."
            head += "transformer.shared_head."
            normed = self.normed(f"{head}norm.weight", states[-1])
            logits.append(self.parts[f"{head}output.weight"] @ normed)
            tokens.append(nodes[index] if index < len(nodes) else int(logits[-1].argmax()))
        return tokens[len(text) :], torch.stack(logits)
