"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from typing import Any

from ..layers.linear import Linear
from ..layers.mlp import FeedForward, gated
from ..layers.moe import Experts, MoE, QuantizedExperts, Router, SoftmaxRouter
from ..layers.reduction import reduction_of
from .base import register
from .llama import gated_mlp
from .qwen3 import Qwen3


@register
class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window  # of all layers; None without `use_sliding_window`
        return window

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of `mlp_only_layers`, or between those of `decoder_sparse_step`
            return gated_mlp(module)
        norm_topk_prob = getattr(module.gate, "norm_topk_prob", True)  # Qwen3-VL always normalizes
        return MoE(softmax_router(module.gate, norm_topk_prob), experts_of(module.experts))


def experts_of(module: Any) -> Experts:
    """Return the experts of a module whose parameters are [experts, out, in], gates before ups, or quantized to FP8."""
    if isinstance(module, QuantizedExperts):
        return module.experts()
    return Experts(
        module.gate_up_proj.detach().mT,
        module.down_proj.detach().mT,
        act=gated(module.act_fn),
        reduction=reduction_of(module),
    )


def softmax_router(module: Any, norm_topk_prob: bool, shared_gate: Linear | None = None) -> Router:
    return SoftmaxRouter.of(Linear(module.weight.detach(), None), module.top_k, norm_topk_prob, shared_gate)
