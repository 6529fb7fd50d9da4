"""ERNIE 4.5 with experts in most layers, and a shared expert in some models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...ops import Routing
from ..layers.mlp import FeedForward
from ..layers.moe import MoE, Router, router_logits, routing_of
from .base import register
from .ernie4_5 import Ernie45
from .llama import gated_mlp
from .qwen3_moe import experts_of


@dataclass(frozen=True)
class CorrectedSoftmaxRouter(Router):
    """Top-k of a softmax plus a correction bias; routing weights are the probabilities without the bias."""

    weight: Tensor  # [experts, H], multiplied in float32
    e_score_correction_bias: Tensor  # [experts]
    top_k: int
    least_sum: float  # lower bound of the sum that normalizes the routing weights

    def __call__(self, x: Tensor) -> Routing:
        probabilities = router_logits(x, self.weight).softmax(-1)
        experts = (probabilities + self.e_score_correction_bias).topk(self.top_k).indices
        weights = probabilities.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.least_sum)
        return routing_of(experts, weights, len(self.weight))


@register
class Ernie45Moe(Ernie45):
    model_type = "ernie4_5_moe"

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return gated_mlp(module)
        gate = module.gate
        router = CorrectedSoftmaxRouter(
            weight=gate.weight.detach(),
            e_score_correction_bias=gate.moe_statics.e_score_correction_bias.detach()[0],
            top_k=gate.top_k,
            least_sum=gate.norm_min,
        )
        shared = module.shared_experts
        return MoE(router, experts_of(module.experts), None if shared is None else gated_mlp(shared))
