"""Feed-forward parts of many experts, of which each row takes a few.

Everything stays on the device and no shape depends on which experts are taken, so that a captured round may take others
each time it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import gate_rows
from .layers import FeedForward, GatedFeedForward, Product
from .quantised import rounded

STRIDE_BYTES = 16  # of which `functional.grouped_mm` takes multiples


class Routes(NamedTuple):
    """Which experts rows take, and what counts of each."""

    experts: Tensor  # [T, taken] int64, no expert twice in a row
    shares: Tensor  # [T, taken] float32


class Router(Protocol):
    """What chooses experts."""

    def __call__(self, x: Tensor) -> Routes:
        """Of rows [T, H]."""


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """The most probable experts; their shares are their probabilities, or with `normalised` these divided by their sum,
    which is the softmax over the scores of those taken alone."""

    scores: Product  # [experts, H]
    taken: int
    normalised: bool

    def __call__(self, x: Tensor) -> Routes:
        shares, experts = self.scores(x).softmax(-1, dtype=torch.float32).topk(self.taken)
        return Routes(experts, shares / shares.sum(-1, keepdim=True) if self.normalised else shares)


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

    def __call__(self, x: Tensor) -> Routes:
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
        return Routes(experts, shares * self.factor)


@dataclass(frozen=True)
class Experts:
    """The experts' products: `down(gate(gate_up(x)))` of each.

    There are three ways to the same sums. `grouped_mm` of torch reads each expert that is taken once. Where it has no
    kernel, or one that waits for the host, the weights of few rows' experts are gathered, which reads them, writes them
    and reads them again; and of many rows every expert computes all, of which what was not asked for is left out.
    """

    gate_up: Tensor  # [experts, H, 2 * inner], of any strides
    down: Tensor  # [experts, inner, H]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, H]
    gate: Callable[[Tensor], Tensor] = gate_rows  # [rows, inner] of [rows, 2 * inner]
    activations: str = "none"  # how the rows that enter a product are rounded, as those of an `Fp8Weight`

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """[T, H] of rows [T, H]: the sum of what their experts make of them, each by its share."""
        way = {"grouped": self.grouped, "gathered": self.gathered, "all": self.all_of_them}[self.plan(x, routes)]
        return way(rounded(x, self.activations), routes)

    def plan(self, x: Tensor, routes: Routes) -> str:
        """Which way is taken, by shapes, dtype and GPU alone: "grouped", "gathered" or "all"."""
        if self._has_grouped_kernel(x):
            return "grouped"
        return "gathered" if routes.experts.numel() <= len(self.gate_up) else "all"

    def _has_grouped_kernel(self, x: Tensor) -> bool:
        strides = [size for weight in (self.gate_up, self.down) for size in weight.stride() if size != 1]
        if any(stride * x.element_size() % STRIDE_BYTES for stride in [*strides, x.shape[-1], self.down.shape[1]]):
            return False
        if not x.is_cuda:
            return True
        # Of other numbers and GPUs torch looks at the offsets on the host and multiplies group by group.
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)

    def grouped(self, x: Tensor, routes: Routes) -> Tensor:
        taken = routes.experts.shape[1]
        experts, order = routes.experts.flatten().sort()
        numbers = torch.arange(len(self.gate_up), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # behind each expert's rows
        wide = functional.grouped_mm(x[order // taken], self.gate_up, offs=ends)
        made = functional.grouped_mm(self._gated(wide, experts), self.down, offs=ends)
        made = made if self.down_bias is None else made + self.down_bias[experts]
        out = torch.empty_like(made)
        out[order] = made
        return weighted(out, routes)

    def gathered(self, x: Tensor, routes: Routes) -> Tensor:
        experts = routes.experts.flatten()
        rows = x.repeat_interleave(routes.experts.shape[1], 0, output_size=len(experts))
        wide = torch.bmm(rows[:, None], self.gate_up[experts])[:, 0]
        made = torch.bmm(self._gated(wide, experts)[:, None], self.down[experts])[:, 0]
        return weighted(made if self.down_bias is None else made + self.down_bias[experts], routes)

    def all_of_them(self, x: Tensor, routes: Routes) -> Tensor:
        shares = torch.zeros(len(x), len(self.gate_up), device=x.device).scatter_(1, routes.experts, routes.shares)
        takes = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, routes.experts, True)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(self.gate_up)):
            made = self._gated(x @ self.gate_up[expert], expert) @ self.down[expert]
            made = made if self.down_bias is None else made + self.down_bias[expert]
            mine = slice(expert, expert + 1)
            # An expert may make infinities of rows that are not its own.
            total += torch.where(takes[:, mine], made * shares[:, mine], 0)
        return total.to(x.dtype)

    def _gated(self, wide: Tensor, experts: Tensor | int) -> Tensor:
        gated = self.gate(wide if self.gate_up_bias is None else wide + self.gate_up_bias[experts])
        return rounded(gated, self.activations)


def weighted(made: Tensor, routes: Routes) -> Tensor:
    """[T, H] of [T * taken, H], which a row's experts made one behind another: their sum in float32, by shares."""
    return (made.view(*routes.experts.shape, -1) * routes.shares[..., None]).sum(1).to(made.dtype)


@dataclass(frozen=True)
class ExpertFeedForward(FeedForward):
    """The experts that a router chooses, and beside them one that all rows share, if any, behind a gate of its own."""

    router: Router
    experts: Experts
    shared: GatedFeedForward | None = None
    shared_gate: Product | None = None  # [1, H], of which the sigmoid counts

    def __call__(self, normed: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = self.experts(normed, self.router(normed))
        if self.shared is not None:
            shared = self.shared.made_of(normed)
            out = out + (shared if self.shared_gate is None else self.shared_gate(normed).sigmoid() * shared)
        return out, state
