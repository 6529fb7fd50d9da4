"""Step-3.5: Gemma's norms, a gate for each head, two kinds of attention, and experts with clamped SwiGLU.

Sliding-window layers have their own number of query heads and their own rotation. Transformers has only the decoder, as
the text model of Step-3.7. This module registers the language model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from ..layers.attention import Attention
from ..layers.head_layout import HeadLayout
from ..layers.linear import linear_of
from ..layers.mlp import FeedForward, GatedMLP, gated
from ..layers.moe import MoE, SigmoidRouter
from ..layers.norm import RMSNorm, gemma_rms_norm_of
from .base import register, window_of
from .llama import Llama, gated_mlp
from .qwen3_moe import experts_of

# Entries of a config that transformers does not read, with what its modules compute.
COMPUTED = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "sink": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "zero_centered": True,
}


class Step3p5Config(Step3p7TextConfig):
    """Lets `AutoModelForCausalLM` register a model: before 5.24 it takes none for a config class of transformers."""


class Step3p5ForCausalLM(Step3p7PreTrainedModel, LlamaForCausalLM):  # type: ignore[misc]
    config_class = Step3p5Config

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = Step3p7TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]


if Step3p5Config not in AutoModelForCausalLM._model_mapping:
    AutoConfig.register(Step3p5Config.model_type, Step3p5Config, exist_ok=True)
    AutoModelForCausalLM.register(Step3p5Config, Step3p5ForCausalLM)
    register_checkpoint_conversion_mapping(
        Step3p5ForCausalLM.__name__,
        [
            WeightRenaming(r"\.moe\.experts\.", ".mlp.experts."),  # of quantizers that store each expert alone
            WeightRenaming(r"\.moe\.gate\.weight", ".mlp.gate.weight"),
            WeightRenaming(r"\.moe\.router_bias", ".mlp.gate.e_score_correction_bias"),
            WeightRenaming(r"\.moe\.down_proj\.weight", ".mlp.experts.down_proj"),
            WeightRenaming(r"\.share_expert\.", ".mlp.shared_experts."),
            WeightConverter(
                [r"moe.gate_proj.weight", r"moe.up_proj.weight"], "mlp.experts.gate_up_proj", [Concatenate(dim=1)]
            ),
        ],
    )


@register
class Step3p5(Llama):
    model_type = "step3p5"

    def check_entries(self, name: str = "model") -> None:
        config = self.config
        for entry, computed in COMPUTED.items():
            if (value := getattr(config, entry, computed)) != computed:
                raise ValueError(f"{name}: {entry} is {value!r}, expected {computed!r}")
        if not all(getattr(config, "use_rope_layers", None) or [True]):
            raise ValueError(f"{name}: use_rope_layers leaves layers out, expected all of them")
        if (types := getattr(config, "yarn_only_types", None)) and types != ["full_attention"]:
            raise ValueError(f"{name}: yarn_only_types is {types!r}, expected ['full_attention']")

    def norm(self, module: Any) -> RMSNorm:
        return gemma_rms_norm_of(module)

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        q_norm, k_norm = (layout.norm(self.norm(norm)) for norm in (module.q_norm, module.k_norm))
        plain = super().attention(index, module, layout)
        return replace(plain, q_norm=q_norm, k_norm=k_norm, gate=linear_of(module.g_proj))

    def window(self, index: int) -> int | None:
        return window_of(self.config, index)

    def rotation(self, index: int) -> str:
        kind: str = self.config.layer_types[index]
        return kind

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        if not hasattr(module, "experts"):
            return clamped_mlp(module)
        router = SigmoidRouter(
            weight=module.gate.weight.detach(),
            e_score_correction_bias=module.gate.e_score_correction_bias,
            top_k=module.gate.top_k,
            routed_scaling_factor=module.routed_scaling_factor,
        )
        experts = replace(experts_of(module.experts), act=gated(module.experts.act_fn, limit_of(module.experts)))
        return MoE(router, experts, clamped_mlp(module.shared_experts))


def limit_of(module: Any) -> float | None:
    """Return the limit of a module's SwiGLU; None: it has none."""
    limit = float(module.limit)
    return None if limit == float("inf") else limit


def clamped_mlp(module: Any) -> GatedMLP:
    return replace(gated_mlp(module), limit=limit_of(module))
