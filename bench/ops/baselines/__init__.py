"""Kernels of other packages as baselines, where they are installed. None of their code is here.

An adapter makes baselines for a case: it allocates what the package's own engine allocates per round, calls the
package's functions, and compares their results with the reference. Written for sglang 0.5.23,
flashinfer-python 0.7.2, arctic-inference 0.3.0 and flash-linear-attention 0.4.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ..harness import Baseline


@cache
def installed(name: str) -> Any:
    """Import a module of another package; None without the package, or, with a note on stderr, if that fails."""
    if find_spec(name.partition(".")[0]) is None:
        return None
    try:
        return import_module(name)
    except Exception as error:  # another package may fail to import in any way
        print(f"specdec bench: {name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def module(name: str, device: torch.device) -> Any:
    """Import a module whose kernels need a GPU; None on a CPU."""
    return installed(name) if device.type == "cuda" else None


def that_run(*baselines: Baseline) -> list[Baseline]:
    """Return the baselines whose call works here; the others are named on stderr."""
    working = []
    for baseline in baselines:
        try:
            baseline.call()
        except Exception as error:  # a package may lack these sizes or this device
            print(f"specdec bench: {baseline.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            working.append(baseline)
    return working
