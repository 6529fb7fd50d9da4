"""Speculative algorithms by the names that the flags give them, and the draft classes they stand for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Draft

CHECKPOINT_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")  # a checkpoint of its own drafts
MODEL_ALGORITHMS = (*CHECKPOINT_ALGORITHMS, "MTP")  # a model drafts, in steps
ALGORITHMS = ("NONE", "NGRAM", *MODEL_ALGORITHMS, "EAGLE3+NGRAM", "MTP+NGRAM")
ALIASES = {"NEXTN": "MTP"}  # SGLang's name


def one_of(*known: str) -> Callable[[str], str]:
    """Return a parser of algorithms in upper or lower case, or of a draft class as `module:Class`."""

    def algorithm(text: str) -> str:
        if ":" in text:
            return text
        name = ALIASES.get(text.upper(), text.upper())
        if name not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}, or a class as module:Class")
        return name

    return algorithm


def draft_class(algorithm: str) -> Callable[..., Draft]:
    """Return the class of the draft that an algorithm with a draft stands for.

    Raises:
        ValueError: no such class of one's own.
    """
    from ..engine import MTP, Eagle, Eagle3, Ngram, Standalone

    classes: dict[str, Callable[..., Draft]] = {"EAGLE": Eagle, "EAGLE3": Eagle3, "STANDALONE": Standalone, "MTP": MTP}
    return own_class(algorithm) if ":" in algorithm else (classes | {"NGRAM": Ngram})[algorithm]


def own_class(path: str) -> Callable[..., Draft]:
    """Return the draft class at `module:Class`; the module may be in the working directory.

    Raises:
        ValueError: there is no such module, or no such class in it.
    """
    name = f"--speculative-algorithm is {path}, expected module:Class of a Draft"
    module, _, attribute = path.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} ({error})") from error
    if not callable(found):
        raise ValueError(f"{name}, got a {type(found).__name__}")
    draft: Callable[..., Draft] = found
    return draft


def algorithm_of(folder: Path) -> str:
    """Return the algorithm that a draft's checkpoint is made for."""
    from ..models.weights.checkpoint import EAGLE, EAGLE3, kind_of

    return {EAGLE: "EAGLE", EAGLE3: "EAGLE3"}.get(kind_of(folder), "STANDALONE")
