"""Mixture-of-experts parts: routers, experts and their GEMMs.

Everything stays on the device and no shape depends on which experts are chosen, so that a captured round may choose
others each time it is replayed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import _C
from ...ops import Routing, moe_grouped_gemm, moe_route, silu_and_mul, small_m_gemm
from .fp8 import FP8, GROUP, fake_quantize, quantize_activations
from .linear import Linear, Projections, SeparateProjections, SplitProjection
from .mlp import Activation, FeedForward, GatedMLP, gated
from .outputs import ExpertOutputs, LayerOutput, PartialSum, combined
from .quantized import Fp8Weight, dequantize_weight, groups_of
from .reduction import LOCAL, Reduction, reduction_of

STRIDE_BYTES = 16  # `functional.grouped_mm` takes strides of multiples of it
MAX_EXPERTS, MAX_TOP_K, MAX_PAIRS, MAX_GROUPS = 1024, 32, 262144, 32  # of our ops
GEMM_INS, GEMM_OUTS = 64, 16  # `moe_grouped_gemm` takes multiples of them, in 16 bits
# With a mean of at most that many rows for each expert, `moe_grouped_gemm` multiplies where torch's grouped GEMM could,
# on an H200 in 0.9 of its time: it reads a weight again for every 32 rows, which next to no expert has where the mean
# is half of that.
FEW_ROWS = 16
MAX_SHARED_PAIRS = 16
# Up to this many rows and elements of the weight, a router's float32 scores come from `small_m_gemm`, which reads the
# weight while earlier kernels still run.
MAX_ROUTER_ROWS, MAX_ROUTER_WEIGHT = 16, 2**19


def has_aligned_rows(weight: Tensor) -> bool:
    """Return whether rows are contiguous and start on 16 bytes."""
    row_bytes = weight.stride(0) * weight.element_size()
    return weight.stride(1) == 1 and row_bytes % STRIDE_BYTES == 0 and weight.data_ptr() % STRIDE_BYTES == 0


def routing_of(experts: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Return the routing of rows to the experts [T, top_k] that are chosen, with their routing weights [T, top_k]."""
    flat, order = experts.flatten().sort()
    ids = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(flat, ids, right=True, out_int32=True)
    return Routing(experts, weights.contiguous(), order, ends)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return scores [T, experts] in float32 for rows [T, H] and a weight [experts, H], accumulated in float32."""
    is_small = len(x) <= MAX_ROUTER_ROWS and weight.numel() <= MAX_ROUTER_WEIGHT
    if is_small and _C.small_m_gemm_plan(x, weight, False) == "sm90.wgmma":
        scores: Tensor = small_m_gemm(x, weight, out=torch.empty(len(x), len(weight), device=x.device))
        return scores
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(x, weight.mT, out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


class Router(Protocol):
    """Chooses the experts of each row."""

    def __call__(self, x: Tensor) -> Routing:
        """Return the routing of rows [T, H]."""


class TopKRouter(Router):
    """A router by `moe_route`, which adds shared experts, or by torch."""

    top_k: int
    n_group: int

    def __call__(self, x: Tensor) -> Routing:
        """Return the routing of rows [T, H]."""
        return self.route(self.scores(x)[0])

    def route(self, scores: Tensor, num_shared: int = 0, shared_gate: Tensor | None = None) -> Routing:
        """Return the routing by scores, with shared experts as `moe_route` adds them.

        Args:
            scores: as `scores` returns them.
            num_shared: shared experts. If there are any, `moe_route` is used on every device, and sizes must fit it.
            shared_gate: scores of their gate; None: they have none.
        """
        if num_shared or (scores.is_cuda and self.fits_moe_route(*scores.shape)):
            return moe_route(scores, self.top_k, num_shared=num_shared, shared_gate=shared_gate, **self.options())
        return self.by_torch(scores)

    def fits_moe_route(self, rows: int, experts: int, num_shared: int = 0) -> bool:
        """Return whether `moe_route` takes such sizes."""
        columns = self.top_k + num_shared
        fits = experts + num_shared <= MAX_EXPERTS and columns <= MAX_TOP_K and rows * columns <= MAX_PAIRS
        return fits and (self.n_group == 1 or self.n_group <= min(MAX_GROUPS, experts // 2))

    @abstractmethod
    def scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores [T, experts] of rows [T, H], and [T, 1] of the gate of a shared expert, if there is one."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the options of `moe_route`."""

    @abstractmethod
    def by_torch(self, scores: Tensor) -> Routing:
        """Return the routing by scores where `moe_route` does not apply, as on a CPU, where torch is faster."""


@dataclass(frozen=True)
class SoftmaxRouter(TopKRouter):
    """Top-k of a softmax over experts.

    Routing weights are the probabilities. With `norm_topk_prob` they are divided by their sum, which makes them the
    softmax over the scores of the chosen experts alone.
    """

    gates: Projections  # [experts, H], and [1, H] of a shared expert
    top_k: int
    norm_topk_prob: bool
    n_group: int = field(default=1, init=False)

    @classmethod
    def of(cls, gate: Linear, top_k: int, norm_topk_prob: bool, shared_gate: Linear | None = None) -> SoftmaxRouter:
        """Return the router with a gate [experts, H], and that of a shared expert [1, H], which share one GEMM.

        The gates become one copy, unless one of them is quantized or has a bias.
        """
        experts, _ = gate.weight.shape
        gates: Projections = SplitProjection(gate, (experts,))
        if shared_gate is None:
            return cls(gates, top_k, norm_topk_prob)
        weights = [linear.weight for linear in (gate, shared_gate) if isinstance(linear.weight, Tensor)]
        if len(weights) == 2 and gate.bias is None and shared_gate.bias is None:
            rows = -(experts + 1) % 8  # so that rows of scores start on 16 bytes
            whole = functional.pad(torch.cat(weights), (0, 0, 0, rows))
            return cls(SplitProjection(Linear(whole, None), (experts, 1)), top_k, norm_topk_prob)
        return cls(SeparateProjections((gates, SplitProjection(shared_gate, (1,)))), top_k, norm_topk_prob)

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        scores, *shared = self.gates(x)
        return scores, next(iter(shared), None)

    def options(self) -> dict[str, Any]:
        return {"renormalize": self.norm_topk_prob}

    def by_torch(self, scores: Tensor) -> Routing:
        weights, experts = scores.softmax(-1, dtype=torch.float32).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights
        return routing_of(experts, weights, scores.shape[1])


@dataclass(frozen=True)
class GroupedSoftmaxRouter(TopKRouter):
    """Top-k of a softmax over experts, from the groups with the best expert each.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.2.2.
    """

    weight: Tensor  # [experts, H], multiplied in float32
    top_k: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return router_logits(x, self.weight), None

    def options(self) -> dict[str, Any]:
        return {"scale": self.routed_scaling_factor, "n_group": self.n_group, "topk_group": self.topk_group}

    def by_torch(self, scores: Tensor) -> Routing:
        probabilities = scores.softmax(-1)
        if self.topk_group < self.n_group:
            grouped = probabilities.view(len(scores), self.n_group, -1)
            best = grouped.amax(-1).topk(self.topk_group).indices
            chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            probabilities = grouped.masked_fill(~chosen[..., None], 0).flatten(1)
        weights, experts = probabilities.topk(self.top_k)
        return routing_of(experts, weights * self.routed_scaling_factor, scores.shape[1])


@dataclass(frozen=True)
class SigmoidRouter(TopKRouter):
    """Top-k by sigmoid scores plus a correction bias, from the best groups of experts; by default all are one group.

    A group's score is the sum of its two best experts'. Routing weights are the scores without the bias. Source:
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """

    weight: Tensor  # [experts, H], multiplied in float32
    e_score_correction_bias: Tensor  # [experts] float32
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    eps: float = 1e-20  # added to the sum by which weights are divided

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return router_logits(x, self.weight), None

    def options(self) -> dict[str, Any]:
        return {
            "renormalize": self.norm_topk_prob,
            "activation": "sigmoid",
            "bias": self.e_score_correction_bias.float(),
            "scale": self.routed_scaling_factor,
            "eps": self.eps,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
        }

    def by_torch(self, scores: Tensor) -> Routing:
        sigmoids = scores.sigmoid()
        grouped = (sigmoids + self.e_score_correction_bias).view(len(scores), self.n_group, -1)
        if self.topk_group < self.n_group:
            best = grouped.topk(2).values.sum(-1).topk(self.topk_group).indices
            chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            grouped = grouped.masked_fill(~chosen[..., None], -torch.inf)
        experts = grouped.flatten(1).topk(self.top_k).indices
        weights = sigmoids.gather(1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return routing_of(experts, weights * self.routed_scaling_factor, scores.shape[1])


@dataclass(frozen=True)
class Experts:
    """The experts' MLPs: `down(act(gate_up(x)))` of each.

    Four implementations compute the same sums. On a GPU `moe_grouped_gemm` reads each expert with few rows once. For
    many rows torch's `grouped_mm` is used. Where neither takes the weights, or torch would wait for the host, the
    weights of few rows' experts are gathered, which reads them, writes them and reads them again; for many rows every
    expert computes all rows, and the results of experts that a row did not choose are dropped.
    """

    gate_up: Tensor  # [experts, H, 2 * inner], of any strides
    down: Tensor  # [experts, inner, H]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, H]
    act: Callable[[Tensor], Tensor] = silu_and_mul  # [rows, inner] from [rows, 2 * inner]
    reduction: Reduction = LOCAL  # sums outputs over the ranks that divide `inner`; left to the caller
    activations: str = "none"  # how rows are quantized before a GEMM, as in `Fp8Weight`

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Return [T, H] from rows [T, H]: the sum of their experts' outputs by routing weight."""
        return self.implementations()[self.plan(x, routing)](x, routing)

    def implementations(self) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
        """Return the implementations by their names in plans."""
        return {
            "moe_grouped_gemm": self.by_grouped_gemm,
            "grouped": self.by_torch_grouped_mm,
            "gathered": self.by_gathered_weights,
            "all": self.by_all_experts,
        }

    def plan(self, x: Tensor, routing: Routing) -> str:
        """Return the implementation for these shapes, dtype and GPU.

        It is "moe_grouped_gemm", "grouped", "gathered" or "all".
        """
        pairs = routing.topk_ids.numel()
        if self.uses_grouped_gemm(x, pairs):
            return "moe_grouped_gemm"
        if self.has_torch_grouped_mm(x):
            return "grouped"
        return "gathered" if pairs <= len(self.gate_up) else "all"

    def uses_grouped_gemm(self, x: Tensor, pairs: int) -> bool:
        """Return whether `moe_grouped_gemm` multiplies this number of (row, expert) pairs."""
        few = pairs <= FEW_ROWS * len(self.gate_up)
        return x.is_cuda and self.fits_grouped_gemm(x) and (few or not self.has_torch_grouped_mm(x))

    def fits_grouped_gemm(self, x: Tensor) -> bool:
        """Return whether `moe_grouped_gemm` takes such rows and the weights as they are stored."""
        for weight in (self.gate_up, self.down):
            num_experts, ins, outs = weight.shape
            if weight.dtype != x.dtype or not weight.mT.is_contiguous():
                return False
            if num_experts > MAX_EXPERTS or ins % GEMM_INS or outs % GEMM_OUTS:
                return False
        return self._has_fused_act(x) and self.activations == "none"

    def num_parts(self, x: Tensor, mlp: GatedMLP) -> int:
        """Return as how many shared experts an MLP joins these in `moe_grouped_gemm`, as it is stored; 0: not at all.

        Call where `uses_grouped_gemm`.
        """
        if self.down_bias is not None or mlp.activation is not None or mlp.limit is not None:
            return 0
        for linear in (mlp.gate_up, mlp.down):
            weight, plain = linear.weight, linear.bias is None and linear.reduction is LOCAL
            if not isinstance(weight, Tensor) or not plain or weight.dtype != x.dtype or not has_aligned_rows(weight):
                return 0
        parts, rest = divmod(mlp.down.weight.shape[1], self.down.shape[1])
        return 0 if rest else parts

    def _has_fused_act(self, x: Tensor) -> bool:
        silu = self.act is silu_and_mul and self.gate_up_bias is None
        return silu and x.dtype in (torch.float16, torch.bfloat16)

    def has_torch_grouped_mm(self, x: Tensor) -> bool:
        """Return whether torch has a grouped GEMM for such rows that does not wait for the host."""
        strides = [size for weight in (self.gate_up, self.down) for size in weight.stride() if size != 1]
        if any(stride * x.element_size() % STRIDE_BYTES for stride in [*strides, x.shape[-1], self.down.shape[1]]):
            return False
        if not x.is_cuda:
            return True
        # For other dtypes and GPUs torch reads the offsets on the host and multiplies group by group.
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)

    def weights_of(self, experts: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gate_up [H, 2 * inner] and down [inner, H] of an expert, or of experts [n], for rows of a dtype."""
        return self.gate_up[experts], self.down[experts]

    def by_grouped_gemm(self, x: Tensor, routing: Routing) -> Tensor:
        return self.expert_outputs(x, routing).combine()

    def expert_outputs(self, x: Tensor, routing: Routing, shared: GatedMLP | None = None) -> ExpertOutputs:
        """Return the experts' outputs before they are summed, by `moe_grouped_gemm`.

        The routing may have shared experts: the `num_parts` of the MLP `shared`.
        """
        outputs = self._grouped_gemm("gate_up", x, routing, shared)
        outputs = self._grouped_gemm("down", outputs, routing, shared)
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[routing.topk_ids.flatten()]
        return ExpertOutputs(outputs, routing.topk_weights)

    def _grouped_gemm(self, part: str, rows: Tensor, routing: Routing, shared: GatedMLP | None) -> Tensor:
        """Multiply each pair's row by the "gate_up" or "down" of its expert."""
        weight = None if shared is None else getattr(shared, part).weight
        return grouped_gemm(part, rows, getattr(self, part), routing, rows.dtype, shared_weight=weight)

    def by_torch_grouped_mm(self, x: Tensor, routing: Routing) -> Tensor:
        order, ends, top_k = routing.sorted_pairs, routing.expert_ends, routing.topk_ids.shape[1]
        experts = routing.topk_ids.flatten()[order]
        wide = functional.grouped_mm(fake_quantize(x, self.activations)[order // top_k], self.gate_up, offs=ends)
        outputs = functional.grouped_mm(self._act(wide, experts), self.down, offs=ends)
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[experts]
        out = torch.empty_like(outputs)
        out[order] = outputs
        return ExpertOutputs(out, routing.topk_weights).combine()

    def by_gathered_weights(self, x: Tensor, routing: Routing) -> Tensor:
        experts, top_k = routing.topk_ids.flatten(), routing.topk_ids.shape[1]
        rows = fake_quantize(x, self.activations).repeat_interleave(top_k, 0, output_size=len(experts))
        gate_up, down = self.weights_of(experts, x.dtype)
        wide = torch.bmm(rows[:, None], gate_up)[:, 0]
        outputs = torch.bmm(self._act(wide, experts)[:, None], down)[:, 0]
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[experts]
        return ExpertOutputs(outputs, routing.topk_weights).combine()

    def by_all_experts(self, x: Tensor, routing: Routing) -> Tensor:
        weights = torch.zeros(len(x), len(self.gate_up), device=x.device)
        weights.scatter_add_(1, routing.topk_ids, routing.topk_weights)  # a zero expert's place may repeat an expert
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, routing.topk_ids, True)
        total = torch.zeros_like(x, dtype=torch.float32)
        x = fake_quantize(x, self.activations)
        for expert in range(len(self.gate_up)):
            gate_up, down = self.weights_of(expert, x.dtype)
            output = self._act(x @ gate_up, expert) @ down
            output = output if self.down_bias is None else output + self.down_bias[expert]
            column = slice(expert, expert + 1)
            # An expert may compute infinities for rows that did not choose it.
            total += torch.where(chosen[:, column], output * weights[:, column], 0)
        return total.to(x.dtype)

    def _act(self, wide: Tensor, experts: Tensor | int) -> Tensor:
        out = self.act(wide if self.gate_up_bias is None else wide + self.gate_up_bias[experts])
        return fake_quantize(out, self.activations)


@dataclass(frozen=True)
class Fp8Experts(Experts):
    """Experts with FP8 weights, which `moe_grouped_gemm` reads as they are stored.

    Where it does not apply, as on the CPU, the chosen experts' weights are dequantized first, or one expert after the
    other: torch has no grouped GEMM of them.

    Attributes:
        gate_up, down: float8_e4m3fn; the inputs of an output are contiguous.
        gate_up_scales, down_scales: [experts, groups, 2 * inner] and [experts, groups, H] float32; one group for a
            whole row, or one for each 128 inputs.
    """

    gate_up_scales: Tensor = field(kw_only=True)
    down_scales: Tensor = field(kw_only=True)

    def implementations(self) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
        return {
            "moe_grouped_gemm": self.by_grouped_gemm,
            "gathered": self.by_gathered_weights,
            "all": self.by_all_experts,
        }

    def has_torch_grouped_mm(self, x: Tensor) -> bool:
        return False

    def fits_grouped_gemm(self, x: Tensor) -> bool:
        """Return whether weights have scales as `moe_grouped_gemm` wants them, in the groups of the activations."""
        for weight, scales in ((self.gate_up, self.gate_up_scales), (self.down, self.down_scales)):
            _, ins, outs = weight.shape
            rows, groups = scales.shape[1] == 1, scales.shape[1] * GROUP == ins
            alike = {"token": rows, "group": groups, "none": rows or groups}[self.activations]
            if not alike or ins % GROUP or outs % GEMM_OUTS:
                return False
        return self._has_fused_act(x)

    def num_parts(self, x: Tensor, mlp: GatedMLP) -> int:
        return 0

    def _grouped_gemm(self, part: str, rows: Tensor, routing: Routing, shared: GatedMLP | None) -> Tensor:
        assert shared is None
        dtype, x_scales = rows.dtype, None
        if self.activations != "none":
            rows, x_scales = quantize_activations(rows, self.activations)
        scales = {"x_scales": x_scales, "weight_scales": getattr(self, f"{part}_scales")}
        return grouped_gemm(part, rows, getattr(self, part), routing, dtype, **scales)

    def weights_of(self, experts: Tensor | int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
            elements = weight.mT.view(torch.uint8)[experts]  # torch indexes bytes on every device
            row_scales = scales[experts].mT.flatten(0, -2)
            rows = elements.flatten(0, -2).view(FP8)
            return dequantize_weight(rows, row_scales, dtype).view(elements.shape).mT

        return dequantized(self.gate_up, self.gate_up_scales), dequantized(self.down, self.down_scales)


class QuantizedExperts(nn.Module):
    """Replaces the experts' module of a transformers model, for our layers and for its own forward pass.

    Elements and scales are buffers, so that no cast of the module reaches them.

    Args:
        num_experts: the number of experts.
        act_fn: the activation of their gates.
        limit: as in `gated`; infinite: none.
    """

    def __init__(self, num_experts: int, act_fn: Activation, limit: float = inf) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.limit = num_experts, act_fn, limit
        self.activations: str | None = None

    def store(self, expert: int, part: str, weight: Fp8Weight) -> None:
        """Store the "gate", "up" or "down" of an expert, whose activations are quantized like all others'."""
        assert self.activations in (None, weight.activations)
        self.activations = weight.activations
        name, (outs, ins) = "down" if part == "down" else "gate_up", weight.shape
        if not hasattr(self, name):
            all_outs = outs if part == "down" else 2 * outs
            device = weight.qweight.device
            elements = torch.zeros(self.num_experts, all_outs, ins, dtype=torch.uint8, device=device)
            scales = torch.zeros(self.num_experts, weight.scales.shape[1], all_outs, device=device)
            self.register_buffer(name, elements.view(FP8), persistent=False)
            self.register_buffer(f"{name}_scales", scales, persistent=False)
        stored = self.stored(expert, part)
        assert stored is not None
        elements, scales = stored
        elements.view(torch.uint8).copy_(weight.qweight.view(torch.uint8))
        scales.copy_(weight.scales.t())

    def stored(self, expert: int, part: str) -> tuple[Tensor, Tensor] | None:
        """Return views of a part's elements [out, in] and scales [groups, out]; None if there is no such part."""
        if not 0 <= expert < self.num_experts or part not in ("gate", "up", "down"):
            return None
        name = "down" if part == "down" else "gate_up"
        elements, scales = self.get_buffer(name)[expert], self.get_buffer(f"{name}_scales")[expert]
        outs = len(elements) if part == "down" else len(elements) // 2
        begin = outs if part == "up" else 0
        return elements[begin : begin + outs], scales[:, begin : begin + outs]

    def divide(self, own: range) -> dict[str, tuple[int, tuple[range, ...]]]:
        """Keep these intermediate elements of each expert.

        Returns:
            The divided dimension of each divided buffer, and the ranges of it that are kept.

        Raises:
            ValueError: they begin or end within a group of elements with one scale.
        """
        buffers = dict(self.named_buffers(recurse=False))
        inner = buffers["down"].shape[2]
        both = own, range(inner + own.start, inner + own.stop)
        rows = torch.tensor([row for part in both for row in part], device=buffers["down"].device)
        groups = groups_of(own, buffers["down_scales"].shape[1], inner, GROUP)
        self.gate_up = buffers["gate_up"].view(torch.uint8)[:, rows].view(FP8)
        self.gate_up_scales = buffers["gate_up_scales"][..., rows].contiguous()
        self.down = buffers["down"][..., own.start : own.stop].contiguous()
        self.down_scales = buffers["down_scales"][:, groups].contiguous()
        divided = {"gate_up": (1, both), "gate_up_scales": (2, both), "down": (2, (own,))}
        if buffers["down_scales"].shape[1] > 1:
            divided["down_scales"] = 1, (range(groups.start, groups.stop),)
        return divided

    def experts(self) -> Fp8Experts:
        """Return the experts, which share the buffers."""
        assert self.activations is not None
        buffers = dict(self.named_buffers(recurse=False))
        gate_up, down = buffers["gate_up"].mT, buffers["down"].mT
        return Fp8Experts(
            gate_up,
            down,
            act=gated(self.act_fn, None if self.limit == inf else self.limit),
            reduction=reduction_of(self),
            activations=self.activations,
            gate_up_scales=buffers["gate_up_scales"],
            down_scales=buffers["down_scales"],
        )

    def numel(self) -> int:
        """Return the number of weight elements."""
        return sum(buffer.numel() for buffer in self.buffers() if buffer.dtype == FP8)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements and scales."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.experts()(hidden_states, routing_of(top_k_index, top_k_weights.float(), self.num_experts))


def grouped_gemm(part: str, rows: Tensor, weight: Tensor, routing: Routing, dtype: torch.dtype, **more: Any) -> Tensor:
    """Run `moe_grouped_gemm` for the "gate_up" or, after it, the "down" [experts, in, out] of each pair's expert.

    The output is not cleared first, since the routing has each pair once. `more` has the weight of shared experts, or
    scales.
    """
    gated = part == "gate_up"
    pairs, ends = routing.sorted_pairs, routing.expert_ends
    out = torch.empty(len(pairs), weight.shape[2] // (2 if gated else 1), dtype=dtype, device=rows.device)
    moe_grouped_gemm(rows, weight.mT, pairs, ends, gated=gated, routing_ready=not gated, out=out, **more)
    return out


@dataclass(frozen=True)
class MoE(FeedForward):
    """Routed experts and, if any, a shared expert that all rows pass. Its gate, if it has one, is the router's.

    For few rows on a GPU the shared expert costs no launches: `moe_grouped_gemm` multiplies it as one or several more
    experts of all rows, whose weight is the sigmoid of its gate. Their outputs are summed in float32.
    """

    router: Router
    experts: Experts
    shared: GatedMLP | None = None

    def __post_init__(self) -> None:
        reduction = self.experts.reduction
        if self.shared is not None and self.shared.down.reduction is reduction is not LOCAL:
            # One reduction sums both.
            down = self.shared.down._replace(reduction=LOCAL)
            object.__setattr__(self, "shared", replace(self.shared, down=down))

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        num_shared = self.num_shared(normed)
        out = self.together(normed, num_shared) if num_shared else self.apart(normed)
        if (reduction := self.experts.reduction) is not LOCAL:
            return PartialSum(combined(out), reduction), residual
        return combined(out) if residual is None else out, residual

    def num_shared(self, x: Tensor) -> int:
        """Return as how many experts the shared one joins the launches of the routed ones; 0: it has its own."""
        if self.shared is None or not isinstance(self.router, TopKRouter) or len(x) > MAX_SHARED_PAIRS:
            return 0
        if not self.experts.uses_grouped_gemm(x, len(x) * self.router.top_k):
            return 0
        parts = self.experts.num_parts(x, self.shared)
        fits = self.router.fits_moe_route(len(x), len(self.experts.gate_up), parts)
        return parts if fits and len(x) * parts <= MAX_SHARED_PAIRS else 0

    def together(self, normed: Tensor, num_shared: int) -> ExpertOutputs:
        """Return the outputs of routed experts, and of the shared one as `num_shared` more of them."""
        assert isinstance(self.router, TopKRouter)
        scores, gate = self.router.scores(normed)
        return self.experts.expert_outputs(normed, self.router.route(scores, num_shared, gate), self.shared)

    def apart(self, normed: Tensor) -> Tensor | ExpertOutputs:
        """Return the outputs of routed experts, or the sum of these and of the shared one's, which has own launches."""
        gate: Tensor | None = None
        if isinstance(self.router, TopKRouter):
            scores, gate = self.router.scores(normed)
            routing = self.router.route(scores)
        else:
            routing = self.router(normed)
        if self.shared is None and self.experts.plan(normed, routing) == "moe_grouped_gemm":
            return self.experts.expert_outputs(normed, routing)
        out = self.experts(normed, routing)
        if self.shared is not None:
            shared = self.shared.output(normed)
            out = out + (shared if gate is None else gate.sigmoid() * shared)
        return out


@dataclass(frozen=True)
class ZeroExpertMoE(FeedForward):
    """Routed experts, and others that return their input.

    Experts are the top-k of a softmax plus a correction bias; routing weights are the softmax alone. Source:
    LongCat-Flash (arXiv 2509.01322), section 2.1, on zero-computation experts.
    """

    weight: Tensor  # [experts and zero experts, H], multiplied in float32
    e_score_correction_bias: Tensor  # [experts and zero experts] float32
    top_k: int
    routed_scaling_factor: float
    experts: Experts
    num_experts: int

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        scores = router_logits(normed, self.weight).softmax(-1)
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(1, chosen) * self.routed_scaling_factor
        is_zero = chosen >= self.num_experts
        # Shapes do not depend on the choice: a zero expert's place goes to some expert, with weight 0.
        routing = routing_of(chosen % self.num_experts, weights.masked_fill(is_zero, 0), self.num_experts)
        own = (weights * is_zero).sum(-1, keepdim=True)
        return self.experts(normed, routing) + (own * normed).to(normed.dtype), residual
