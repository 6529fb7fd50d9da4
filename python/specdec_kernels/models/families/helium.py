"""Llama under other names: InternLM3, IQuest-Coder, Seed-OSS, and with pairs of neighbours that rotate Helium and ERNIE
4.5."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class InternLM3(Llama):
    model_type = "internlm3"


@register
class IQuestCoder(Llama):
    model_type = "iquestcoder"


@register
class SeedOss(Llama):
    model_type = "seed_oss"


@register
class Helium(Llama):
    model_type = "helium"
    interleaved = True


@register
class Ernie45(Llama):
    model_type = "ernie4_5"
    interleaved = True
