"""LongCat-Flash: layers of two latent attentions and MLPs each, with experts next to the second half."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.decoder_layer import Layer, ShortcutLayer
from ..layers.head_layout import HeadLayout
from ..layers.latent_attention import LatentAttention
from ..layers.moe import Experts, ZeroExpertMoE
from .base import register
from .latent import Latent, latent_attention
from .llama import gated_mlp
from .qwen3_moe import experts_of


@register
class LongcatFlash(Latent):
    model_type = "longcat_flash"

    @property
    def rotates_neighbors(self) -> bool:
        return True

    @property
    def num_kv_layers(self) -> int:
        return 2 * int(self.config.num_layers)

    def division(self) -> dict[str, Any]:
        raise ValueError(
            f"model: {self.model_type} is not divided among ranks (its layers add experts to the second half)"
        )

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        first, second = (self.half(module, half, layout) for half in range(2))
        return ShortcutLayer(**first, second=Layer(**second), experts=zero_expert_moe(module.mlp))

    def half(self, module: Any, half: int, layout: HeadLayout) -> dict[str, Any]:
        """Return the parts of one of a layer's two halves."""
        return {
            "input_norm": self.norm(module.input_layernorm[half]),
            "mixer": scaled_attention(module.self_attn[half], layout),
            "pre_feed_forward_norm": self.norm(module.post_attention_layernorm[half]),
            "feed_forward": gated_mlp(module.mlps[half]),
        }


def scaled_attention(module: Any, layout: HeadLayout) -> LatentAttention:
    """Return the attention of a module that multiplies queries and normalized latent parts."""
    part = latent_attention(module, layout.rope)
    norm = part.kv_norm
    return replace(
        part,
        scale=part.scale * module.mla_scale_q_lora,
        kv_norm=norm._replace(weight=norm.weight * module.mla_scale_kv_lora),
    )


def zero_expert_moe(module: Any) -> ZeroExpertMoE:
    """Return the experts of a module, whose gates and ups have rows for zero experts that nobody reads."""
    router, experts, count = module.router, experts_of(module.experts), module.config.n_routed_experts
    if isinstance(experts, Experts):
        experts = replace(experts, gate_up=experts.gate_up[:count])
    return ZeroExpertMoE(
        weight=router.classifier.weight.detach(),
        e_score_correction_bias=router.e_score_correction_bias,
        top_k=router.top_k,
        routed_scaling_factor=router.routed_scaling_factor,
        experts=experts,
        num_experts=count,
    )
