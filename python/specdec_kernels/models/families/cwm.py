"""CWM: Ministral under another name."""

from __future__ import annotations

from .base import register
from .ministral import Ministral


@register
class Cwm(Ministral):
    model_type = "cwm"
