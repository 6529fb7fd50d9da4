"""What proposes a round's tree: one class per algorithm, all with the interface of `Draft`."""

from .base import Draft
from .build import build_draft

__all__ = ["Draft", "build_draft"]
