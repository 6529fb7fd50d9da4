"""Draft heads in one small file: weights in 8 bits, without what the target has.

Each row of a weight has a scale. The LM head's rows are the target's, of the tokens of the draft vocabulary: the file
keeps only which tokens these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SCALES = ".scales"  # of the rows of a weight
KEPT = "kept"  # the target's ids of the draft vocabulary


def pack_head(config: Mapping[str, Any], tensors: Mapping[str, Tensor], kept: Tensor, file: Path) -> None:
    """Write a head to a file.

    Args:
        config: of the published format.
        tensors: of the published format, without LM head and draft vocabulary.
        kept: the target's ids of the draft vocabulary, increasing.
        file: to write.

    Raises:
        ValueError: the draft vocabulary does not increase, or a tensor cannot be packed.
    """
    if bool((kept.diff() <= 0).any()):
        raise ValueError("the ids of a draft vocabulary must increase")
    packed = {KEPT: kept.to(torch.int32).cpu()}
    for name, tensor in tensors.items():
        if name in {KEPT, "lm_head.weight", "d2t", "t2d"} or name.endswith(SCALES):
            raise ValueError(f"{name} is not a tensor of a packed head")
        if tensor.dim() not in {1, 2} or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} is not a finite vector or matrix")
        tensor = tensor.float().cpu()
        if tensor.dim() == 1:
            packed[name] = tensor
            continue
        scales = tensor.abs().amax(1).clamp(min=1e-12) / 127
        packed[name] = (tensor / scales[:, None]).round().to(torch.int8)
        packed[name + SCALES] = scales
    save_file(packed, file, metadata={"config": json.dumps(dict(config))})


def unpack_head(file: Path, lm_head: Tensor, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a packed head in its published format.

    Args:
        file: of `pack_head`.
        lm_head: the target's, [V, H].
        folder: to write, which exists.
        dtype: of the weights.

    Raises:
        ValueError: the file is not a packed head, or one of a target with another LM head.
    """
    with safe_open(file, "pt") as opened:
        config = json.loads((opened.metadata() or {}).get("config", "null"))
        packed = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    if config is None or KEPT not in packed:
        raise ValueError(f"{file} is not a packed head")
    shape = config["vocab_size"], config["hidden_size"]
    if tuple(lm_head.shape) != shape:
        raise ValueError(f"{file} belongs to a target with an LM head {list(shape)}, not {list(lm_head.shape)}")
    kept = packed.pop(KEPT).long()
    tensors = {}
    for name, tensor in packed.items():
        if name.endswith(SCALES):
            continue
        scales = packed.get(name + SCALES)
        tensors[name] = (tensor if scales is None else tensor * scales[:, None]).to(dtype)
    tensors["lm_head.weight"] = lm_head[kept].to(dtype)
    tensors["d2t"] = kept - torch.arange(len(kept))
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
