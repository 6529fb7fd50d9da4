"""The experts of a layer, in the shape of Qwen3-30B-A3B: every way to multiply, beside the one that is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.models.experts import Experts, Routes

from ..compare import bytes_of, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work

ERROR = 1e-2  # of 16-bit results


def experts(device: torch.device, p: Params) -> Work:
    """Rows choose at random, so that every further one takes experts that no row before it took."""
    dtype, rows = getattr(torch, p["dtype"]), p["rows"]
    number, taken, width, inner = p["experts"], p["taken"], p["width"], p["inner"]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    part = Experts((random(number, 2 * inner, width) / width**0.5).mT, (random(number, width, inner) / inner**0.5).mT)
    x, out = random(rows, width), poisoned(rows, width, dtype=dtype, device=device)
    routes = Routes(
        torch.rand(rows, number, device=device).topk(taken).indices, torch.rand(rows, taken, device=device) / taken
    )
    want = reference(part, x, routes)
    touched = len(routes.experts.unique())
    ways = {"grouped": part.grouped, "gathered": part.gathered, "all": part.all_of_them}
    captures = {"gathered", "all", part.plan(x, routes)} if x.is_cuda else set(ways)

    return Work(
        call=lambda: out.copy_(part(x, routes)),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=touched * 3 * width * inner * x.element_size() + bytes_of(x, out, *routes),
        flops=2 * 3 * rows * taken * width * inner,
        peers=[
            Baseline(name, lambda way=way: way(x, routes), lambda got: expect_near("out", got, want, ERROR))  # type: ignore[misc]
            for name, way in ways.items()
            if name in captures
        ],
        facts={"plan": part.plan(x, routes), "touched": touched},
    )


def reference(part: Experts, x: Tensor, routes: Routes) -> Tensor:
    """Row by row and expert by expert, in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for row in range(len(x)):
        for expert, share in zip(routes.experts[row].tolist(), routes.shares[row].tolist(), strict=True):
            gate, up = (x[row].float() @ part.gate_up[expert].float()).chunk(2)
            out[row] += share * ((torch.nn.functional.silu(gate) * up) @ part.down[expert].float())
    return out


CASES = (
    Case(
        "experts",
        grid={
            "rows": (1, 2, 4, 8, 16, 32, 64),
            "experts": (128,),
            "taken": (8,),
            "width": (2048,),
            "inner": (768,),
            "dtype": ("bfloat16",),
        },
        cpu_grid={
            "rows": (1, 8),
            "experts": (16,),
            "taken": (4,),
            "width": (256,),
            "inner": (128,),
            "dtype": ("float32",),
        },
        make=experts,
    ),
)
