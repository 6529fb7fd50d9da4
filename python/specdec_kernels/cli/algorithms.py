"""Speculative algorithms by the names that the flags give them, and the draft classes they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Draft

CHECKPOINT_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")  # a checkpoint drafts
ALGORITHMS = ("NONE", "NGRAM", *CHECKPOINT_ALGORITHMS, "EAGLE3+NGRAM")


def draft_class(algorithm: str) -> Callable[..., Draft]:
    """Return the class of the draft that one of CHECKPOINT_ALGORITHMS stands for."""
    from ..engine import Eagle, Eagle3, Standalone

    classes: dict[str, Callable[..., Draft]] = {"EAGLE": Eagle, "EAGLE3": Eagle3, "STANDALONE": Standalone}
    return classes[algorithm]


def algorithm_of(folder: Path) -> str:
    """Return the algorithm that a draft's checkpoint is made for."""
    from ..models.weights.checkpoint import EAGLE, EAGLE3, kind_of

    return {EAGLE: "EAGLE", EAGLE3: "EAGLE3"}.get(kind_of(folder), "STANDALONE")
