"""IQuest-Coder: Llama under another name."""

from __future__ import annotations

from .base import register
from .llama import Llama


@register
class IQuestCoder(Llama):
    model_type = "iquestcoder"
