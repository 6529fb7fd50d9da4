"""The language models of Qwen2-VL, 2.5-VL and 3-VL: of text alone, where the three positions of a token are one, those
of Qwen2 and Qwen3. What Qwen3-VL adds to states (deepstack) comes from images."""

from __future__ import annotations

from .base import register
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .qwen3_moe import Qwen3Moe


@register
class Qwen2Vl(Qwen2):
    model_type = "qwen2_vl_text"


@register
class Qwen25Vl(Qwen2):
    model_type = "qwen2_5_vl_text"


@register
class Qwen3Vl(Qwen3):
    model_type = "qwen3_vl_text"

    def window(self, index: int) -> int | None:
        return None


@register
class Qwen3VlMoe(Qwen3Moe):
    model_type = "qwen3_vl_moe_text"

    def window(self, index: int) -> int | None:
        return None
