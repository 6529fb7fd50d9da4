"""Nemotron-H: layers of one part each, Mamba 2, attention without rotation, an MLP or experts without gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.decoder_layer import FeedForwardLayer, Layer, MixerLayer
from ..layers.head_layout import HeadLayout
from ..layers.linear import Linear, linear_of
from ..layers.mlp import MLP, FeedForward
from ..layers.moe import Experts, Router
from ..layers.outputs import LayerOutput, combined
from ..layers.reduction import reduction_of
from ..state_cache import RecurrenceSpec
from .base import register
from .glm4_moe import sigmoid_router
from .hybrid import Mamba2Hybrid


@dataclass(frozen=True)
class LatentMoE(FeedForward):
    """Routed experts between two projections, if there are any, and a shared expert without a gate."""

    router: Router
    experts: Experts
    shared: MLP
    enter: Linear | None  # from the rows to what the experts read
    leave: Linear | None

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        routing = self.router(normed)
        out = self.experts(normed if self.enter is None else self.enter(normed), routing)
        out = self.experts.reduction.sum(out)
        out = out if self.leave is None else self.leave(out)
        return out + combined(self.shared(normed, None)[0]), residual


@register
class NemotronH(Mamba2Hybrid):
    model_type = "nemotron_h"
    last_norm_name = "norm_f"
    act_name = "mamba_hidden_act"
    mamba_path = "mixer"

    @property
    def types(self) -> list[str]:
        kinds: list[str] = self.config.layers_block_type
        return kinds

    @property
    def mamba_sizes(self) -> RecurrenceSpec:
        config = self.config
        return RecurrenceSpec(config.n_groups, config.mamba_num_heads, config.ssm_state_size, config.mamba_head_dim)

    @property
    def conv_width(self) -> int:
        width: int = self.config.conv_kernel
        return width

    def rotary(self, body: Any) -> Any:
        return None

    def rotation(self, index: int) -> str | None:
        return None

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        norm, part = self.norm(module.norm), module.mixer
        if hasattr(part, "A_log"):
            return MixerLayer(input_norm=norm, mixer=self.mamba(part))
        if hasattr(part, "q_proj"):
            return MixerLayer(input_norm=norm, mixer=self.attention(index, part, layout))
        return FeedForwardLayer(input_norm=norm, feed_forward=self.feed_forward(index, part))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return plain_mlp(module)
        experts = module.experts
        latent = [getattr(module, name) for name in ("fc1_latent_proj", "fc2_latent_proj")]
        enter, leave = (None if isinstance(each, torch.nn.Identity) else linear_of(each) for each in latent)
        return LatentMoE(
            router=sigmoid_router(module.gate),
            experts=Experts(
                experts.up_proj.detach().mT,
                experts.down_proj.detach().mT,
                act=experts.act_fn,
                reduction=reduction_of(experts),
            ),
            shared=plain_mlp(module.shared_experts),
            enter=enter,
            leave=leave,
        )


def plain_mlp(module: Any) -> MLP:
    return MLP(linear_of(module.up_proj), linear_of(module.down_proj), module.act_fn)
