"""Tensors of a checkpoint folder: safetensors, else `.bin` files through the restricted unpickler."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `*.safetensors` in the folder, or of `*.bin` if it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    files = sorted(folder.glob("*.bin"))
    if not files:
        raise ValueError(f"checkpoint: {folder} has no *.safetensors and no *.bin, expected one of them")
    return {
        name: tensor
        for file in files
        for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items()
    }
