"""Seed-OSS: Llama under another name."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class SeedOss(Llama):
    model_type = "seed_oss"
