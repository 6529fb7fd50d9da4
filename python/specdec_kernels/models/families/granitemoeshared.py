"""Granite with experts and a shared expert."""

from __future__ import annotations

from .base import register
from .granitemoe import GraniteMoe


@register
class GraniteMoeShared(GraniteMoe):
    model_type = "granitemoeshared"
