"""Feed-forward parts of many experts, of which each row takes a few.

Everything stays on the device and no shape depends on which experts are taken, so that a captured round may take others
each time it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops import Routing, moe_grouped_gemm, moe_route, silu_and_mul
from .linear import FeedForward, GatedFeedForward, MadeRows, Product
from .quantized import FP8, GROUP, Fp8Weight, in_eight_bits, rounded, widened

STRIDE_BYTES = 16  # of which `functional.grouped_mm` takes multiples
MAX_EXPERTS, MAX_TAKEN = 1024, 32  # that our ops take
OUR_INS, OUR_OUTS = 64, 16  # of which `moe_grouped_gemm` takes multiples, in 16 bits
# Up to so many rows an expert in the mean `moe_grouped_gemm` multiplies where torch's grouped product could, on an
# H200 in
# 0.9 of its time: it reads a weight again for every 32, which next to no expert has where the mean is half of that.
FEW_ROWS = 16


def routes_of(experts: Tensor, shares: Tensor, number: int) -> Routing:
    """Of what rows take of so many experts."""
    flat, order = experts.flatten().sort()
    numbers = torch.arange(number, device=experts.device)
    ends = torch.searchsorted(flat, numbers, right=True, out_int32=True)
    return Routing(experts, shares.contiguous(), order, ends)


class Router(Protocol):
    """What chooses experts."""

    def __call__(self, x: Tensor) -> Routing:
        """Of rows [T, H]."""


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """The most probable experts; their shares are their probabilities, or with `normalised` these divided by their sum,
    which is the softmax over the scores of those taken alone."""

    scores: Product  # [experts, H]
    taken: int
    normalised: bool

    def __call__(self, x: Tensor) -> Routing:
        scores = self.scores(x)
        number = scores.shape[1]
        if scores.is_cuda and number <= MAX_EXPERTS and self.taken <= MAX_TAKEN:
            return moe_route(scores, self.taken, renormalize=self.normalised)
        shares, experts = scores.softmax(-1, dtype=torch.float32).topk(self.taken)
        return routes_of(experts, shares / shares.sum(-1, keepdim=True) if self.normalised else shares, number)


@dataclass(frozen=True)
class SigmoidRouter(Router):
    """Experts of the best groups by the sigmoids of their scores and a correction, which shares leave out again.

    A group is as good as its best two experts together. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """

    weight: Tensor  # [experts, H], multiplied in float32
    correction: Tensor  # [experts] float32
    taken: int
    groups: int
    groups_taken: int
    normalised: bool
    factor: float  # of all shares

    def __call__(self, x: Tensor) -> Routing:
        likings = functional.linear(x.float(), self.weight.float()).sigmoid()
        grouped = (likings + self.correction).view(len(x), self.groups, -1)
        if self.groups_taken < self.groups:
            best = grouped.topk(2).values.sum(-1).topk(self.groups_taken).indices
            taken = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            grouped = grouped.masked_fill(~taken[..., None], -torch.inf)
        experts = grouped.flatten(1).topk(self.taken).indices
        shares = likings.gather(1, experts)
        if self.normalised:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return routes_of(experts, shares * self.factor, len(self.weight))


@dataclass(frozen=True)
class Experts:
    """The experts' products: `down(gate(gate_up(x)))` of each.

    There are four ways to the same sums. On a GPU `moe_grouped_gemm` reads each expert that few rows take once. Of
    many rows
    `grouped_mm` of torch does. Where neither multiplies such weights, or torch waits for the host, those of few rows'
    experts are gathered, which reads them, writes them and reads them again; and of many rows every expert computes
    all, of which what was not asked for is left out.
    """

    gate_up: Tensor  # [experts, H, 2 * inner], of any strides
    down: Tensor  # [experts, inner, H]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, H]
    gate: Callable[[Tensor], Tensor] = silu_and_mul  # [rows, inner] of [rows, 2 * inner]
    activations: str = "none"  # how the rows that enter a product are rounded, as those of an `Fp8Weight`

    def __call__(self, x: Tensor, routes: Routing) -> Tensor:
        """[T, H] of rows [T, H]: the sum of what their experts make of them, each by its share."""
        return self.ways()[self.plan(x, routes)](x, routes)

    def ways(self) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
        """By their names in plans."""
        return {
            "moe_grouped_gemm": self.by_our_op,
            "grouped": self.grouped,
            "gathered": self.gathered,
            "all": self.all_of_them,
        }

    def plan(self, x: Tensor, routes: Routing) -> str:
        """Which way is taken, by shapes, dtype and GPU alone: "moe_grouped_gemm", "grouped", "gathered" or "all"."""
        grouped, pairs = self.has_grouped_kernel(x), routes.topk_ids.numel()
        if x.is_cuda and self.fits_our_op(x) and (pairs <= FEW_ROWS * len(self.gate_up) or not grouped):
            return "moe_grouped_gemm"
        if grouped:
            return "grouped"
        return "gathered" if pairs <= len(self.gate_up) else "all"

    def fits_our_op(self, x: Tensor) -> bool:
        """Whether `moe_grouped_gemm` multiplies such rows by the weights as they are stored."""
        for weight in (self.gate_up, self.down):
            number, ins, outs = weight.shape
            if weight.dtype != x.dtype or not weight.mT.is_contiguous():
                return False
            if number > MAX_EXPERTS or ins % OUR_INS or outs % OUR_OUTS:
                return False
        return self._gate_is_ours(x) and self.activations == "none"

    def _gate_is_ours(self, x: Tensor) -> bool:
        silu = self.gate is silu_and_mul and self.gate_up_bias is None
        return silu and x.dtype in (torch.float16, torch.bfloat16)

    def has_grouped_kernel(self, x: Tensor) -> bool:
        """Whether torch has a grouped product of such rows that does not wait for the host."""
        strides = [size for weight in (self.gate_up, self.down) for size in weight.stride() if size != 1]
        if any(stride * x.element_size() % STRIDE_BYTES for stride in [*strides, x.shape[-1], self.down.shape[1]]):
            return False
        if not x.is_cuda:
            return True
        # Of other numbers and GPUs torch looks at the offsets on the host and multiplies group by group.
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)

    def weights_of(self, experts: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gates and ups [H, 2 * inner] and downs [inner, H] of an expert, or of experts [n], for rows of a dtype."""
        return self.gate_up[experts], self.down[experts]

    def by_our_op(self, x: Tensor, routes: Routing) -> Tensor:
        return self.made_of(x, routes).combined()

    def made_of(self, x: Tensor, routes: Routing) -> MadeRows:
        """What is to be summed, by `moe_grouped_gemm`."""
        made = self._pairs("down", self._pairs("gate_up", x, routes), routes)
        made = made if self.down_bias is None else made + self.down_bias[routes.topk_ids.flatten()]
        return MadeRows(made, routes.topk_weights)

    def _pairs(self, part: str, rows: Tensor, routes: Routing) -> Tensor:
        """What the "gate_up" or "down" of each pair's expert makes of its row, by `moe_grouped_gemm`."""
        return pairs_of(part, rows, getattr(self, part), routes, rows.dtype)

    def grouped(self, x: Tensor, routes: Routing) -> Tensor:
        order, ends, taken = routes.sorted_pairs, routes.expert_ends, routes.topk_ids.shape[1]
        experts = routes.topk_ids.flatten()[order]
        wide = functional.grouped_mm(rounded(x, self.activations)[order // taken], self.gate_up, offs=ends)
        made = functional.grouped_mm(self._gated(wide, experts), self.down, offs=ends)
        made = made if self.down_bias is None else made + self.down_bias[experts]
        out = torch.empty_like(made)
        out[order] = made
        return MadeRows(out, routes.topk_weights).combined()

    def gathered(self, x: Tensor, routes: Routing) -> Tensor:
        experts = routes.topk_ids.flatten()
        rows = rounded(x, self.activations).repeat_interleave(routes.topk_ids.shape[1], 0, output_size=len(experts))
        gate_up, down = self.weights_of(experts, x.dtype)
        wide = torch.bmm(rows[:, None], gate_up)[:, 0]
        made = torch.bmm(self._gated(wide, experts)[:, None], down)[:, 0]
        made = made if self.down_bias is None else made + self.down_bias[experts]
        return MadeRows(made, routes.topk_weights).combined()

    def all_of_them(self, x: Tensor, routes: Routing) -> Tensor:
        shares = torch.zeros(len(x), len(self.gate_up), device=x.device).scatter_(
            1, routes.topk_ids, routes.topk_weights
        )
        takes = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, routes.topk_ids, True)
        total = torch.zeros_like(x, dtype=torch.float32)
        x = rounded(x, self.activations)
        for expert in range(len(self.gate_up)):
            gate_up, down = self.weights_of(expert, x.dtype)
            made = self._gated(x @ gate_up, expert) @ down
            made = made if self.down_bias is None else made + self.down_bias[expert]
            mine = slice(expert, expert + 1)
            # An expert may make infinities of rows that are not its own.
            total += torch.where(takes[:, mine], made * shares[:, mine], 0)
        return total.to(x.dtype)

    def _gated(self, wide: Tensor, experts: Tensor | int) -> Tensor:
        gated = self.gate(wide if self.gate_up_bias is None else wide + self.gate_up_bias[experts])
        return rounded(gated, self.activations)


@dataclass(frozen=True)
class Fp8Experts(Experts):
    """Experts whose weights are kept in 8 bits: `moe_grouped_gemm` reads those that are taken as they are stored.
    Where it
    does not multiply, as on the CPU, those that are taken are widened first, or one after the other: torch has no
    grouped product of them.

    Attributes:
        gate_up, down: of float8_e4m3fn; inputs of an output stand one behind another.
        gate_up_scales, down_scales: [experts, groups, 2 * inner] and [experts, groups, H] float32, one group of a whole
            row or one of each 128 inputs.
    """

    gate_up_scales: Tensor = field(kw_only=True)
    down_scales: Tensor = field(kw_only=True)

    def ways(self) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
        return {"moe_grouped_gemm": self.by_our_op, "gathered": self.gathered, "all": self.all_of_them}

    def has_grouped_kernel(self, x: Tensor) -> bool:
        return False

    def fits_our_op(self, x: Tensor) -> bool:
        """Whether weights have scales as `moe_grouped_gemm` wants them, of the groups in which rows are rounded."""
        for weight, scales in ((self.gate_up, self.gate_up_scales), (self.down, self.down_scales)):
            _, ins, outs = weight.shape
            rows, groups = scales.shape[1] == 1, scales.shape[1] * GROUP == ins
            alike = {"token": rows, "group": groups, "none": rows or groups}[self.activations]
            if not alike or ins % GROUP or outs % OUR_OUTS:
                return False
        return self._gate_is_ours(x)

    def _pairs(self, part: str, rows: Tensor, routes: Routing) -> Tensor:
        dtype, of_rows = rows.dtype, None
        if self.activations != "none":
            rows, of_rows = in_eight_bits(rows, self.activations)
        scales = {"x_scales": of_rows, "weight_scales": getattr(self, f"{part}_scales")}
        return pairs_of(part, rows, getattr(self, part), routes, dtype, **scales)

    def weights_of(self, experts: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def wide(weight: Tensor, scales: Tensor) -> Tensor:
            numbers = weight.mT.view(torch.uint8)[experts]  # of which torch takes rows wherever it runs
            of_rows = scales[experts].mT.flatten(0, -2)
            return widened(numbers.flatten(0, -2).view(FP8), of_rows, dtype).view(numbers.shape).mT

        return wide(self.gate_up, self.gate_up_scales), wide(self.down, self.down_scales)


class QuantisedExperts(nn.Module):
    """What stands in a module of transformers where the parameters of all experts stood, and serves both our parts and
    its own forward pass. Its numbers and scales are buffers: nobody casts them.

    Args:
        number: of experts.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.activations: str | None = None

    def store(self, expert: int, part: str, weight: Fp8Weight) -> None:
        """Takes the "gate", "up" or "down" of an expert, whose activations are rounded as those of all others."""
        assert self.activations in (None, weight.activations)
        self.activations = weight.activations
        name, (outs, ins) = "down" if part == "down" else "gate_up", weight.shape
        if not hasattr(self, name):
            all_outs = outs if part == "down" else 2 * outs
            device = weight.numbers.device
            numbers = torch.zeros(self.number, all_outs, ins, dtype=torch.uint8, device=device)
            scales = torch.zeros(self.number, weight.scales.shape[1], all_outs, device=device)
            self.register_buffer(name, numbers.view(FP8), persistent=False)
            self.register_buffer(f"{name}_scales", scales, persistent=False)
        place = self.places(expert, part)
        assert place is not None
        numbers, scales = place
        numbers.view(torch.uint8).copy_(weight.numbers.view(torch.uint8))
        scales.copy_(weight.scales.t())

    def places(self, expert: int, part: str) -> tuple[Tensor, Tensor] | None:
        """Where numbers [out, in] and scales [groups, out] of a part stand; None for an expert or part that is none."""
        if not 0 <= expert < self.number or part not in ("gate", "up", "down"):
            return None
        name = "down" if part == "down" else "gate_up"
        numbers, scales = self.get_buffer(name)[expert], self.get_buffer(f"{name}_scales")[expert]
        outs = len(numbers) if part == "down" else len(numbers) // 2
        begin = outs if part == "up" else 0
        return numbers[begin : begin + outs], scales[:, begin : begin + outs]

    def experts(self) -> Fp8Experts:
        """The experts' products, which share the buffers."""
        assert self.activations is not None
        buffers = dict(self.named_buffers(recurse=False))
        gate_up, down = buffers["gate_up"].mT, buffers["down"].mT
        return Fp8Experts(
            gate_up,
            down,
            activations=self.activations,
            gate_up_scales=buffers["gate_up_scales"],
            down_scales=buffers["down_scales"],
        )

    def numel(self) -> int:
        """Of all weights."""
        return sum(buffer.numel() for buffer in self.buffers() if buffer.dtype == FP8)

    @property
    def nbytes(self) -> int:
        """Of all numbers and scales."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.experts()(hidden_states, routes_of(top_k_index, top_k_weights.float(), self.number))


def pairs_of(part: str, rows: Tensor, weight: Tensor, routes: Routing, dtype: torch.dtype, **scales: Any) -> Tensor:
    """`moe_grouped_gemm` of the "gate_up" or, behind it, "down" [experts, in, out]. Nobody has to clear what it writes,
    since routes have each pair once."""
    gated = part == "gate_up"
    out = torch.empty(len(routes.sorted_pairs), weight.shape[2] // (2 if gated else 1), dtype=dtype, device=rows.device)
    moe_grouped_gemm(
        rows,
        weight.mT,
        routes.sorted_pairs,
        routes.expert_ends,
        gated=gated,
        routing_ready=not gated,
        out=out,
        **scales,
    )
    return out


@dataclass(frozen=True)
class ExpertFeedForward(FeedForward):
    """The experts that a router chooses, and beside them one that all rows share, if any, behind a gate of its own."""

    router: Router
    experts: Experts
    shared: GatedFeedForward | None = None
    shared_gate: Product | None = None  # [1, H], of which the sigmoid counts

    def __call__(self, normed: Tensor, state: Tensor | None) -> tuple[Tensor | MadeRows, Tensor | None]:
        routes = self.router(normed)
        if state is not None and self.shared is None and self.experts.plan(normed, routes) == "moe_grouped_gemm":
            return self.experts.made_of(normed, routes), state
        out = self.experts(normed, routes)
        if self.shared is not None:
            shared = self.shared.made_of(normed)
            out = out + (shared if self.shared_gate is None else self.shared_gate(normed).sigmoid() * shared)
        return out, state
