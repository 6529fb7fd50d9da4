"""FP8 activations with their scales, and torch's FP8 GEMMs, each tried once before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...ops import quantize_fp8

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
GROUP = 128  # elements of a row that share a scale, and rows and columns of a block of a weight
KERNEL_ERROR = 2e-2  # of a kernel's bfloat16 results, relative to the definition's


class QuantizedActivations(NamedTuple):
    """FP8 activations with their scales; `dtype` is the original type."""

    values: Tensor  # [T, in] float8_e4m3fn
    scales: Tensor  # [1, T] or [groups, T] float32
    dtype: torch.dtype

    @classmethod
    def quantize(cls, x: Tensor, activations: str, input_scale: Tensor | None = None) -> QuantizedActivations:
        """Quantize rows [..., in] as `Fp8Weight.activations` says."""
        return cls(*quantize_activations(x.reshape(-1, x.shape[-1]), activations, input_scale), x.dtype)

    def dequantize(self) -> Tensor:
        """Return [T, in] in the original dtype."""
        return (self.values.float() * expand_scales(self.scales.t(), self.values.shape[1])).to(self.dtype)


def quantize_activations(x: Tensor, activations: str, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows [T, in] as float8_e4m3fn and their scales, [1, T] or [groups, T] float32."""
    assert (activations == "static") is (input_scale is not None)
    return quantize_fp8(x, group_size=GROUP if activations == "group" else None, scale=input_scale)


def fake_quantize(x: Tensor, activations: str) -> Tensor:
    """Return rows [T, in] quantized and dequantized again, in their own dtype."""
    return x if activations == "none" else QuantizedActivations.quantize(x, activations).dequantize()


def expand_scales(scales: Tensor, columns: int) -> Tensor:
    """Return a scale for each element [rows, columns] from [rows, groups]; [rows, 1] as it is."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(GROUP, 1)[:, :columns]


def column_major(scales: Tensor) -> Tensor:
    """Return the same scales in column-major order, as GEMMs with groups take them."""
    return scales.t().contiguous().t()


# Arguments: activations, their scales [groups, T], a weight's elements, its scales [out, groups].
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def scaled_by_rows(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Multiply with one scale for each row, by torch."""
    out: Tensor = torch._scaled_mm(
        values, weight.t(), scales.flatten()[:, None], weight_scales.flatten()[None], out_dtype=torch.bfloat16
    )
    return out


def scaled_by_groups(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Multiply with a scale for each group of 128 elements, by torch."""
    rows = -(-len(values) // 16) * 16 - len(values)  # so that each column of scales starts on 16 bytes
    padded = functional.pad(values.view(torch.uint8), (0, 0, 0, rows)).view(FP8)
    scales_of_rows = functional.pad(scales, (0, rows), value=1.0).t()
    kind = functional.ScalingType.BlockWise1x128
    out: Tensor = functional.scaled_mm(
        padded, weight.t(), scales_of_rows, kind, column_major(weight_scales), kind, output_dtype=torch.bfloat16
    )
    return out[: len(values)]


@cache
def verified_kernel(kernel: Kernel, device: int) -> Kernel | None:
    """Return the kernel if this GPU and this torch have it and its results match the definition's."""
    return kernel if matches_definition(kernel, torch.device("cuda", device)) else None


def matches_definition(kernel: Kernel, device: torch.device) -> bool:
    """Return whether a kernel runs on the device and computes what the definition says."""
    generator = torch.Generator().manual_seed(0)
    outs, ins, by_groups = 272, 640, kernel is scaled_by_groups
    qweight = (torch.randn(outs, ins, generator=generator) * 20).to(device, FP8)
    scales = torch.rand(outs, ins // GROUP if by_groups else 1, generator=generator).to(device) + 0.5
    activations = "group" if by_groups else "token"
    weight = qweight.double() * expand_scales(scales, ins)  # no Fp8Weight, which verifies this kernel when it is built
    for rows in (1, 5, 64):
        x, x_scales = quantize_activations(torch.randn(rows, ins, generator=generator).to(device), activations)
        want = (x.double() * expand_scales(x_scales.t(), ins)) @ weight.t()
        try:
            got = kernel(x, x_scales, qweight, scales)
        except (RuntimeError, AttributeError, ValueError, TypeError):  # how torch says that it has no such kernel here
            return False
        if not bool(((got.double() - want).norm() <= KERNEL_ERROR * want.norm()).item()):
            return False
    return True
