"""GEMMs with FP8 and INT4 weights in the shapes of an 8B model's layers, and in 16 bits as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

import specdec_kernels as sd
from specdec_kernels.models.layers.fp8 import GROUP, fake_quantize, quantize_activations
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.quantized import Fp8Weight, Int4Weight, QuantizedWeight

from ..check import bytes_of, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from ..stored_weights import STORED
from .layers import random

ERROR = 1e-2  # of 16-bit results
INNER_TILES = 8  # of torch's INT4 layout


def stored_linear(device: torch.device, p: Params) -> Work:
    x, dense = random(p, device, p["rows"], p["width"]), random(p, device, p["outs"], p["width"])
    weight = STORED[p["weights"]](dense)
    out = poisoned(p["rows"], p["outs"], dtype=x.dtype, device=device)
    want = fake_quantize(x, getattr(weight, "activations", "none")).float() @ weight.dequantize().t()
    want_dense = x.float() @ dense.float().t()
    stored, dense_linear = Linear(weight, None), Linear(dense, None)
    return Work(
        call=lambda: out.copy_(stored(x)),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(x, out) + weight.nbytes,
        flops=2 * x.shape[0] * dense.numel(),
        just_written=[x],
        baseline=Baseline("16 bits", lambda: dense_linear(x), lambda got: expect_near("out", got, want_dense, ERROR)),
        packages=[
            Baseline(name, call, lambda got: expect_near("out", got, want, ERROR))
            for name, call in kernels_of(x, weight)
        ],
        facts={"plan": weight.plan(x)},
    )


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    assert isinstance(weight, Fp8Weight | Int4Weight)
    dense: Tensor = sd.dequantize(weight.qweight, weight.scales.t(), dtype=str(dtype).removeprefix("torch."))
    return dense


def kernels_of(x: Tensor, weight: QuantizedWeight) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Return the definition as a baseline, and torch's own kernel if it has one."""
    rows = fake_quantize(x, getattr(weight, "activations", "none"))
    yield "dequantized", lambda: functional.linear(rows, dequantized(weight, x.dtype))
    if isinstance(weight, Fp8Weight) and (kernel := weight.torch_kernel(x, x.dtype)) is not None:
        quantized = quantize_activations(x, weight.activations)
        yield "torch", lambda: kernel(*quantized, weight.qweight, weight.scales)
    if isinstance(weight, Int4Weight) and x.is_cuda and x.dtype == torch.bfloat16:
        elements = sd.dequantize(weight.qweight, torch.ones_like(weight.scales.t()), dtype="float32").to(torch.uint8)
        bits = weight.scales.view(torch.int32)
        tiles = torch._convert_weight_to_int4pack(elements[:, ::2] << 4 | elements[:, 1::2], INNER_TILES)
        zeros = (8 - (bits & 15)) * weight.scales
        both = torch.stack([weight.scales.t(), zeros.t()], -1).to(x.dtype).contiguous()
        yield "torch", lambda: torch._weight_int4pack_mm(x, tiles, GROUP, both)


CASES = (
    Case(
        "stored_linear",
        grid={
            "rows": (1, 6, 32, 64),
            "weights": tuple(STORED),
            "width": (4096, 12288),
            "outs": (4096, 6144, 24576),
            "dtype": ("bfloat16",),
        },
        cpu_grid={
            "rows": (1, 6),
            "weights": tuple(STORED),
            "width": (256,),
            "outs": (512,),
            "dtype": ("float32", "bfloat16"),
        },
        make=stored_linear,
    ),
)
