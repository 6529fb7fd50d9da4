"""Dense weights quantized to the formats of published checkpoints, without training.

"fp8-rows", a scale for each row and one for each row of activations, is FP8-dynamic of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.models.layers.fp8 import FP8, GROUP, LARGEST
from specdec_kernels.models.layers.moe import QuantizedExperts
from specdec_kernels.models.layers.quantized import Fp8Weight, Int4Weight, QuantizedLinear, QuantizedWeight
from specdec_kernels.models.weights.formats import of_blocks


def fp8_blocks(weight: Tensor) -> QuantizedWeight:
    """Quantize with a scale for each block of 128 x 128, activations by groups of 128: as Qwen3-8B-FP8."""
    outs, ins = weight.shape
    padded = functional.pad(weight.float(), (0, -ins % GROUP, 0, -outs % GROUP))
    scales = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP)).abs().amax((1, 3)) / LARGEST
    spread = scales.repeat_interleave(GROUP, 0)[:outs].repeat_interleave(GROUP, 1)[:, :ins]
    return of_blocks((weight.float() / spread).to(FP8), scales, "group")


def int4(weight: Tensor) -> QuantizedWeight:
    """Quantize groups of 128 columns, with zero point 8 and a 16-bit scale."""
    grouped = weight.float().unflatten(1, (-1, min(GROUP, weight.shape[1])))
    scales = (grouped.abs().amax(-1) / 7).to(torch.bfloat16).float()
    elements = ((grouped / scales[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    return Int4Weight.pack(elements, torch.full_like(scales, 8, dtype=torch.uint8), scales)


STORED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8": fp8_blocks,
    "fp8-rows": Fp8Weight.of_rows,
    "int4": int4,
}


def stored_experts(gate_up: Tensor, down: Tensor, kind: str, limit: float = inf) -> QuantizedExperts:
    """Quantize experts' weights [experts, out, in], gates before ups; `limit` is that of their SwiGLU.

    Raises:
        ValueError: a kind that is not FP8.
    """
    experts = QuantizedExperts(len(down), nn.SiLU(), limit)
    for expert in range(len(down)):
        for part, weight in zip(("gate", "up", "down"), (*gate_up[expert].chunk(2), down[expert]), strict=True):
            stored = STORED[kind](weight)
            if not isinstance(stored, Fp8Weight):
                raise ValueError(f"experts are stored in {kind}, expected fp8 or fp8-rows")
            experts.store(expert, part, stored)
    return experts


@torch.no_grad()
def store_layers(model: Any, kind: str) -> None:
    """Quantize the projections and experts of all layers in place, as if loaded from a checkpoint; not the head.

    Raises:
        ValueError: experts in a kind that is not FP8.
    """
    layers: nn.Module = model.get_decoder().layers
    for path, module in list(layers.named_modules()):
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and path.endswith("experts"):
            limit = getattr(module, "limit", inf)
            experts = stored_experts(module.gate_up_proj.data, module.down_proj.data, kind, limit)
            layers.set_submodule(path, experts)
    for path, linear in list(layers.named_modules()):
        if type(linear) is nn.Linear:
            parent, _, leaf = path.rpartition(".")
            stored = QuantizedLinear(linear)
            stored.store(STORED[kind](linear.weight))
            setattr(layers.get_submodule(parent), leaf, stored)
