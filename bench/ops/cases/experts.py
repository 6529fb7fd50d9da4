"""The experts of a layer in the shape of Qwen3-30B-A3B: every backend, with the default one as the op."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.models.layers.fp8 import fake_quantize
from specdec_kernels.models.layers.moe import Experts, routing_of
from specdec_kernels.ops import Routing

from ..check import bytes_of, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from ..stored_weights import stored_experts

ERROR = 2e-2  # of 16-bit results, and of values that round to either of two FP8 values


def experts(device: torch.device, p: Params) -> Work:
    """Route rows at random, so that every further row selects new experts."""
    dtype, rows = getattr(torch, p["dtype"]), p["rows"]
    num_experts, top_k, width, inner = p["experts"], p["top_k"], p["width"], p["inner"]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    gate_up, down = random(num_experts, 2 * inner, width) / width**0.5, random(num_experts, width, inner) / inner**0.5
    stored = "weights" in p
    part = stored_experts(gate_up, down, p["weights"]).experts() if stored else Experts(gate_up.mT, down.mT)
    x, out = random(rows, width), poisoned(rows, width, dtype=dtype, device=device)
    selected = torch.rand(rows, num_experts, device=device).topk(top_k).indices
    routing = routing_of(selected, torch.rand(rows, top_k, device=device) / top_k, num_experts)
    want = reference(part, x, routing)
    touched = len(routing.topk_ids.unique())
    implementations, plan = part.implementations(), part.plan(x, routing)
    captures = {"gathered", "all", plan} if x.is_cuda else set(implementations) - ({"moe_grouped_gemm"} - {plan})
    captures |= {"grouped"} if part.has_torch_grouped_mm(x) else set()
    item = 1 if stored else x.element_size()

    def check_output(got: Tensor = out) -> None:
        expect_near("out", got, want, ERROR)

    return Work(
        call=lambda: out.copy_(part(x, routing)),
        check=check_output,
        bytes_moved=touched * 3 * width * inner * item + bytes_of(x, out, *routing),
        flops=2 * 3 * rows * top_k * width * inner,
        just_written=[x],
        packages=[
            Baseline(name, partial(backend, x, routing), check_output)
            for name, backend in implementations.items()
            if name in captures
        ],
        facts={"plan": plan, "touched": touched},
    )


def reference(part: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Compute row by row and expert by expert, in float32."""
    out = torch.zeros(x.shape, device=x.device)
    x = fake_quantize(x, part.activations).float()
    for row in range(len(x)):
        for expert, weight in zip(routing.topk_ids[row].tolist(), routing.topk_weights[row].tolist(), strict=True):
            gate_up, down = part.weights_of(expert, torch.float32)
            gate, up = (x[row] @ gate_up.float()).chunk(2)
            inner = fake_quantize((torch.nn.functional.silu(gate) * up)[None], part.activations)[0]
            out[row] += weight * (inner @ down.float())
    return out


SIZES: dict[str, Any] = {
    "rows": (1, 2, 4, 8, 16, 32, 64),
    "experts": (128,),
    "top_k": (8,),
    "width": (2048,),
    "inner": (768,),
    "dtype": ("bfloat16",),
}
CPU_SIZES: dict[str, Any] = {
    "rows": (1, 8),
    "experts": (16,),
    "top_k": (4,),
    "width": (256,),
    "inner": (128,),
    "dtype": ("float32",),
}
WEIGHTS = ("fp8", "fp8-rows")
CASES = (
    Case("experts", grid=SIZES, cpu_grid=CPU_SIZES, make=experts),
    Case(
        "moe_grouped_gemm",
        grid=SIZES | {"weights": WEIGHTS},
        cpu_grid=CPU_SIZES | {"weights": WEIGHTS},
        make=experts,
    ),
)
