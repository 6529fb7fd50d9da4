"""Tensors of a checkpoint folder: safetensors, else `.bin` files through the restricted unpickler."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn


def expect_folder(model: str | Path | nn.Module, name: str) -> None:
    """FileNotFoundError for what is meant as a path (and no hub id, no module) but is no folder."""
    if isinstance(model, nn.Module):
        return
    text = str(model)
    meant = isinstance(model, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if meant and not Path(text).is_dir():
        raise FileNotFoundError(f"{name} is {text}, expected an existing folder or a hub id")


def local_folder(model: str | Path, name: str) -> Path:
    """The folder itself, or that of a snapshot of the hub id."""
    expect_folder(model, name)
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.bin"]))


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
