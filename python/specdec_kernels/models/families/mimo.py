"""MiMo-7B: Qwen2 with an MTP layer. Transformers has no such type, so it is registered there as a kind of Qwen2."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from .base import register
from .qwen2 import Qwen2


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


if MiMoConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


@register
class MiMo(Qwen2):
    model_type = "mimo"
