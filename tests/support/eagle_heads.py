"""Random EAGLE heads on disk: in folders of their own, or with a target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec_kernels.tiny import tiny_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE = 256, 4, 2, 64, 320

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


def random_tensors(bias: bool, wide: int = WIDE) -> dict[str, Tensor]:
    torch.manual_seed(3)
    layer = "layers.0."
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (wide, HIDDEN),
        layer + "mlp.up_proj.weight": (wide, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, wide),
    }
    tensors = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    tensors[layer + "post_attention_layernorm.weight"] = torch.rand(HIDDEN) + 0.5
    if bias:
        tensors["fc.bias"] = torch.randn(HIDDEN) / 4
        for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}self_attn.{name}_proj.bias"] = torch.randn(width * HEAD_DIM) / 4
    return tensors


def write_head(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_target_with_head(folder: Path, tensors: dict[str, Tensor], prefix: str) -> Path:
    """Write the tiny target with a head's tensors under a prefix of its checkpoint."""
    shutil.copytree(tiny_model("target"), folder)
    file = folder / "model.safetensors"
    head = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    return folder
