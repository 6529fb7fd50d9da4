"""Qwen3 with experts: Qwen3, in most layers of which each row takes a few of many feed-forward parts. Mellum has a
sliding window in some layers, which rotate by angles of their own."""

from __future__ import annotations

from typing import Any

from ..layers.linear import FeedForward, Product
from ..layers.moe import ExpertFeedForward, Experts, QuantisedExperts, Router, SoftmaxRouter
from .base import register, window_of
from .llama import gated
from .qwen3 import Qwen3


@register
class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"

    def window(self, index: int) -> int | None:
        window: int | None = self.config.sliding_window  # None without `use_sliding_window`; of all layers
        return window

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of `mlp_only_layers`, or between those of `decoder_sparse_step`
            return gated(module)
        normalised = getattr(module.gate, "norm_topk_prob", True)  # those of Qwen3-VL always are
        return ExpertFeedForward(softmax_router(module.gate, normalised), experts_of(module.experts))


@register
class Mellum(Qwen3Moe):
    model_type = "mellum"

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str:
        kind: str = self.config.layer_types[index]
        return kind


def experts_of(module: Any) -> Experts:
    """Of a module whose parameters are [experts, out, in], gates before ups, or of one that keeps them in 8 bits."""
    if isinstance(module, QuantisedExperts):
        return module.experts()
    return Experts(module.gate_up_proj.detach().mT, module.down_proj.detach().mT)


def softmax_router(module: Any, normalised: bool) -> Router:
    return SoftmaxRouter(Product(module.weight.detach(), None), module.top_k, normalised)
