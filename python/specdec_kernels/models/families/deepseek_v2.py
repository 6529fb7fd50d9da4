"""DeepSeek-V2 and V2-Lite: latent attention, and after the first layers experts by a softmax."""

from __future__ import annotations

from typing import Any

from ..layers.mlp import FeedForward
from ..layers.moe import GroupedSoftmaxRouter, MoE
from .base import register
from .latent import Latent
from .llama import gated_mlp
from .qwen3_moe import experts_of

TOPK_METHODS = ("greedy", "group_limited_greedy")


@register
class DeepseekV2(Latent):
    model_type = "deepseek_v2"

    @property
    def rotates_neighbors(self) -> bool:
        return True

    def check(self, name: str = "model") -> None:
        super().check(name)
        method = self.config.topk_method
        if method not in TOPK_METHODS:
            raise ValueError(f"{name}: topk_method is {method!r}, expected one of {', '.join(TOPK_METHODS)}")

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of the first `first_k_dense_replace`
            return gated_mlp(module)
        gate = module.gate
        has_groups = gate.topk_method == "group_limited_greedy"
        router = GroupedSoftmaxRouter(
            weight=gate.weight.detach(),
            top_k=gate.top_k,
            n_group=gate.num_group if has_groups else 1,
            topk_group=gate.topk_group if has_groups else 1,
            routed_scaling_factor=gate.routed_scaling_factor,
        )
        return MoE(router, experts_of(module.experts), gated_mlp(module.shared_experts))
