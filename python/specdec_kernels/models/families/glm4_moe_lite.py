"""GLM-4.7-Flash: DeepSeek-V3 with sizes of its own."""

from __future__ import annotations

from .base import register
from .deepseek_v3 import DeepseekV3


@register
class Glm4MoeLite(DeepseekV3):
    model_type = "glm4_moe_lite"
