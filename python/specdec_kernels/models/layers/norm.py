"""Norms, each fused with the residual addition before it where a kernel does both."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...ops import add_rms_norm
from .fp8 import GROUP, QuantizedActivations
from .linear import Linear
from .outputs import ExpertOutputs, LayerOutput, PartialSum, combined
from .quantized import Fp8Weight
from .reduction import LOCAL, Reduction, reduction_of

PACK = 8  # 16-bit elements in 16 bytes; `add_rms_norm` quantizes rows of a multiple of them


class Norm(Protocol):
    """A norm before attention, before a feed-forward part, or before the LM head."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., H] from [..., H]."""

    def add_norm(self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return x + residual normalized, and x + residual, [T, H] each.

        The sum is written to `out`, or over the residual; without a residual it is x itself. The first result may be
        `QuantizedActivations`, where its consumer takes them.
        """


class PostNorm(Protocol):
    """Transforms a part's output before it is added to the residual stream: a norm or a scale."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return [..., H] from [..., H]."""


def post_normed(norm: PostNorm | None, x: LayerOutput) -> LayerOutput:
    """Return a part's output after the norm or scale that follows it, if there is one.

    A norm reduces a partial sum in its own launch; a scaled one stays partial.
    """
    if norm is None:
        return x
    if isinstance(x, PartialSum) and isinstance(norm, Scale):
        return x._replace(partial=norm(x.partial))
    if isinstance(x, PartialSum) and isinstance(norm, RMSNorm) and norm.reduction is LOCAL:
        normed: Tensor = x.reduction.add_norm(norm, x.partial, None, None)[0]
        return normed
    return norm(combined(x))


class Scale(NamedTuple):
    """Multiplies a part's output before it is added to the residual stream."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class RMSNorm(NamedTuple):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    weight: Tensor  # [H]
    eps: float
    reduction: Reduction = LOCAL  # averages mean squares over the ranks that divide the rows; `__call__` alone has it

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., H] from [..., H]."""
        if self.reduction is not LOCAL:
            rows = x.float()
            mean = self.reduction.sum(rows.square().mean(-1, keepdim=True)) / self.reduction.size
            return (rows * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)
        rows, _ = add_rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps)
        out: Tensor = rows.view(x.shape)
        return out

    def add_norm(self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if isinstance(x, PartialSum):
            result: tuple[Tensor, Tensor] = x.reduction.add_norm(self, x.partial, residual, out)
            return result
        rows, weights = x if isinstance(x, ExpertOutputs) else (x, None)
        outs = None, residual if out is None else out
        normed, total = add_rms_norm(rows, self.weight, self.eps, residual=residual, topk_weights=weights, out=outs)
        return normed, total


class RMSNormQuant(NamedTuple):
    """RMSNorm and FP8 quantization of its output in one launch, for a linear with quantized activations."""

    norm: RMSNorm
    activations: str  # as in `Fp8Weight`, "token" or "group"

    @classmethod
    def before(cls, norm: Norm | None, consumer: object) -> Norm | None:
        """Return the norm that quantizes for a consumer which takes that; any other norm as it is."""
        weight = consumer.weight if isinstance(consumer, Linear) else None
        if not isinstance(norm, RMSNorm) or not isinstance(weight, Fp8Weight):
            return norm
        if weight.activations not in ("token", "group") or weight.shape[1] % PACK:
            return norm
        return cls(norm, weight.activations)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add_norm(
        self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None
    ) -> tuple[QuantizedActivations, Tensor]:
        if isinstance(x, PartialSum):
            result: tuple[QuantizedActivations, Tensor] = x.reduction.add_norm(self, x.partial, residual, out)
            return result
        rows, weights = x if isinstance(x, ExpertOutputs) else (x, None)
        count = len(rows if weights is None else weights)
        groups = 1 if self.activations == "token" else -(-rows.shape[1] // GROUP)
        # Groups start on 16 bytes, as `small_m_gemm` wants them.
        scales = torch.empty(groups, -(-count // 4) * 4, dtype=torch.float32, device=rows.device)[:, :count]
        values, total = add_rms_norm(
            rows,
            self.norm.weight,
            self.norm.eps,
            residual=residual,
            topk_weights=weights,
            out=(None, residual if out is None else out),
            out_scales=scales,
        )
        return QuantizedActivations(values, scales, rows.dtype), total


class LayerNorm(NamedTuple):
    """LayerNorm by torch (Ba et al. 2016, arXiv 1607.06450)."""

    weight: Tensor | None  # [H]; None: ones
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add_norm(self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = add_residual(x, residual, out)
        return self(total), total


class NoNorm(NamedTuple):
    """The identity, for layers whose parts read the residual stream as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_norm(self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = add_residual(x, residual, out)
        return total, total


def add_residual(x: LayerOutput, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Return x + residual, written to `out` or over the residual; x itself without a residual."""
    x = combined(x)
    return x if residual is None else torch.add(x, residual, out=residual if out is None else out)


def rms_norm_of(norm: Any) -> RMSNorm:
    """Return the RMSNorm of a transformers module, which calls its eps `variance_epsilon`."""
    return RMSNorm(norm.weight.detach(), norm.variance_epsilon, reduction_of(norm))


def gemma_rms_norm_of(norm: Any) -> RMSNorm:
    """Return the RMSNorm of a module that multiplies by 1 + weight.

    The sum is computed in float32 and rounded to the weight's dtype. The module keeps it in float32, so that results
    differ by one rounding of 16-bit weights.
    """
    return RMSNorm((1 + norm.weight.detach().float()).to(norm.weight.dtype), norm.eps)


def layer_norm_of(norm: Any) -> LayerNorm:
    """Return the LayerNorm of an `nn.LayerNorm`."""
    weight, bias = (None if part is None else part.detach() for part in (norm.weight, norm.bias))
    return LayerNorm(weight, bias, norm.eps)
