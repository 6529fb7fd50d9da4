"""Youtu-LLM: latent attention and dense MLPs."""

from __future__ import annotations

from .base import register
from .latent import Latent


@register
class Youtu(Latent):
    model_type = "youtu"
