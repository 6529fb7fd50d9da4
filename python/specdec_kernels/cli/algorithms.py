"""Speculative algorithms by the names that the flags give them, and the draft classes they stand for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import Draft

BLOCK_ALGORITHMS = ("DFLASH", "DFLASH2", "DSPARK", "JETSPEC")  # a drafter that yields all positions in one pass
STEP_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
CHECKPOINT_ALGORITHMS = (*STEP_ALGORITHMS, *BLOCK_ALGORITHMS)  # a checkpoint of its own drafts
MODEL_ALGORITHMS = (*STEP_ALGORITHMS, "MTP")  # a model drafts, in steps
IN_TARGET = ("MTP", "DSPARK")  # a target's checkpoint may have the draft in it
WITH_NGRAMS = "+NGRAM"
UNIONS = tuple(f"{name}{WITH_NGRAMS}" for name in ("EAGLE3", "MTP", *BLOCK_ALGORITHMS))
ALGORITHMS = ("NONE", "NGRAM", *MODEL_ALGORITHMS, *BLOCK_ALGORITHMS, *UNIONS)
ALIASES = {"NEXTN": "MTP"}  # SGLang's name
REFUSED = {
    "UNO": "it drafts by a forward pass of the target with a LoRA on the draft's rows alone, and here adapters are "
    "merged into the weights"
}


def one_of(*known: str) -> Callable[[str], str]:
    """Return a parser of algorithms in upper or lower case, or of a draft class as `module:Class`."""

    def algorithm(text: str) -> str:
        if ":" in text:
            return text
        name = ALIASES.get(text.upper(), text.upper())
        if name in REFUSED:
            raise argparse.ArgumentTypeError(f"{text!r} is not supported: {REFUSED[name]}")
        if name not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}, or a class as module:Class")
        return name

    return algorithm


def model_part(algorithm: str) -> str:
    """Return the algorithm of the model in a union with the n-gram index; of others, the algorithm itself."""
    return algorithm.removesuffix(WITH_NGRAMS)


def make_draft(algorithm: str, head: Any, options: Mapping[str, Any], corpus: Sequence[str] = ()) -> Draft:
    """Return the draft of an algorithm, which is the union of a model's draft and the n-gram index for UNIONS.

    Args:
        algorithm: one with a draft, or a class as `module:Class`.
        head: checkpoint of the draft; None: it needs none, or the target has it.
        options: of the draft. In a union, of the model's: each part proposes `num_nodes` nodes at most, and as many
            are verified.
        corpus: text files that the index of a union starts with.

    Raises:
        ValueError: options out of range.
    """
    from ..engine.drafts.union import with_ngrams

    draft = draft_class(model_part(algorithm))(*([] if head is None else [head]), **options)
    return with_ngrams(draft, options["num_nodes"], corpus) if algorithm in UNIONS else draft


def draft_class(algorithm: str) -> Callable[..., Draft]:
    """Return the class of the draft that an algorithm with a draft stands for.

    Raises:
        ValueError: no such class of one's own.
    """
    from .. import engine

    if ":" in algorithm:
        return own_class(algorithm)
    classes: tuple[Callable[..., Draft], ...] = (
        engine.Eagle,
        engine.Eagle3,
        engine.Standalone,
        engine.MTP,
        engine.Ngram,
        engine.DFlash,
        engine.DFlash2,
        engine.DSpark,
        engine.JetSpec,
    )
    return {each.__name__.upper(): each for each in classes}[algorithm]


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
    from ..models.weights.checkpoint import kind_of

    draft = kind_of(folder).draft
    return "STANDALONE" if draft is None else draft.upper()
