"""LFM2 with experts after the first layers."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.mlp import FeedForward
from ..layers.moe import MoE, SigmoidRouter
from .base import register
from .lfm2 import Lfm2
from .qwen3_moe import experts_of


@register
class Lfm2Moe(Lfm2):
    model_type = "lfm2_moe"

    def rotary(self, body: Any) -> Any:
        return body.pos_emb

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):  # one of the first `num_dense_layers`
            return super().feed_forward(index, module)
        gate = module.gate
        bias = module.expert_bias if gate.use_expert_bias else torch.zeros_like(gate.weight[:, 0]).detach()
        router = SigmoidRouter(
            weight=gate.weight.detach(),
            e_score_correction_bias=bias,
            top_k=gate.top_k,
            norm_topk_prob=gate.norm_topk_prob,
            routed_scaling_factor=gate.routed_scaling_factor,
            eps=1e-6,
        )
        return MoE(router, experts_of(module.experts))
