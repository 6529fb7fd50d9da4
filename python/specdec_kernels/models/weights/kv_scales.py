"""Scales of FP8 KV pools: those of a checkpoint, or measured ones.

Keys and values are divided by their layer's scale and written in float8_e4m3fn. The relative error is at most 2^-4 from
2^-6 to 448 times the scale; larger ones are clamped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..kv_pools import KvLayout
from .checkpoint import load_tensors, local_folder

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
ROOM = 4.0  # least factor between the largest measured element and LARGEST

# As llm-compressor and AutoFP8 name them (`self_attn.k_scale`), ModelOpt (`self_attn.k_proj.k_scale`), and older
# versions of the first two (`self_attn.k_proj.output_scale`; `self_attn.kv_scale` for both).
SCALE_NAME = re.compile(r"(?:.+\.)?layers\.(\d+)\.self_attn\.(?:(k|v|kv)_scale|([kv])_proj\.(?:\3_scale|output_scale))")


def kv_dtype_of(kv_dtype: str | torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of KV pools for a user's `kv_dtype` and weights of `dtype`.

    Raises:
        ValueError: neither that of the weights nor float8_e4m3fn.
    """
    if kv_dtype is None or kv_dtype == dtype:
        return dtype
    if kv_dtype not in (FP8, "fp8_e4m3"):
        raise ValueError(f"Engine: kv_dtype is {kv_dtype!r}, expected None (that of the weights), 'fp8_e4m3' or {FP8}")
    return FP8


def checkpoint_scales(
    model: str | Path | nn.Module, layouts: Sequence[KvLayout], name: str
) -> list[tuple[float, ...]] | None:
    """Return the scales of each layer's pools in a folder or hub id; None: it has none, or the model is a module.

    Raises:
        ValueError: some layers have scales and others do not, or a scale that is no positive number.
    """
    if isinstance(model, nn.Module):
        return None
    folder = local_folder(model, name)
    scales: list[dict[str, float]] = [{} for _ in layouts]
    for tensor, value in load_tensors(folder, SCALE_NAME.fullmatch).items():
        match = SCALE_NAME.fullmatch(tensor)
        assert match is not None
        if value.numel() != 1 or not 0 < float(value) < math.inf:
            raise ValueError(f"{name}: {folder} has {tensor} {value.tolist()}, expected one number above 0")
        if int(match[1]) < len(layouts):
            scales[int(match[1])] |= dict.fromkeys(match[2] or match[3], float(value))
    if not any(scales):
        return None
    for layer, (layout, of_layer) in enumerate(zip(layouts, scales, strict=True)):
        if lacking := set(layout.scale_names) - of_layer.keys():
            raise ValueError(f"{name}: {folder} has no {min(lacking)}_scale in layer {layer}, expected one in each")
    return [
        tuple(of_layer[scale] for scale in layout.scale_names) for layout, of_layer in zip(layouts, scales, strict=True)
    ]


def measured_scale(elements: Tensor) -> float:
    """Return a power of two, which divides exactly, that leaves ROOM above the largest of these elements."""
    largest = float(elements.abs().max())
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * ROOM / LARGEST))
