"""Engines whose weights are replaced while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.tiny import tiny_model
from support.tiny_checkpoint import held_out

TARGET, HEAD = Path(tiny_model("target")), Path(tiny_model("eagle3"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def changed(tensors: dict[str, Tensor], share: float = 0.05, seed: int = 0) -> dict[str, Tensor]:
    """Return weights that lead to other texts: each element is off by a fraction of its tensor's spread."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        spread = tensor.float().std() if tensor.numel() > 1 else 0.0
        noise = share * spread * torch.randn(tensor.shape, generator=generator)
        return (tensor.float() + noise).to(tensor.dtype)

    return {name: moved(tensor) for name, tensor in tensors.items()}


def make_engine(target: Any, draft: Draft | None, device: torch.device | str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_len": 256, "num_slots": 4, "page_size": 4, "dtype": torch.float32, "adaptive": False, "device": device,
    }  # fmt: skip
    return Engine(target, draft=draft, **(defaults | options))


def eagle3(head: Path) -> Draft:
    return Eagle3(head, num_steps=3, topk=3, num_nodes=10)


PARAMS = [SamplingParams(20), SamplingParams(20, temperature=0.9, seed=3)]


def texts(engine: Engine) -> list[list[int]]:
    prompts = held_out("code")[:3]
    outputs = engine.generate([*prompts, *prompts], [PARAMS[0]] * 3 + [PARAMS[1]] * 3)
    return [output.tokens for output in outputs]


DRAFTS: dict[str, Any] = {
    "none": lambda target, head: Draft(),
    "eagle3": lambda target, head: eagle3(head),
    "standalone": lambda target, head: Standalone(target, num_steps=2, topk=2, num_nodes=6),
    "ngram": lambda target, head: Ngram(num_nodes=8),
    "union": lambda target, head: Union(Ngram(num_nodes=6), eagle3(head), num_nodes=10),
}
