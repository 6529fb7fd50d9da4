"""Other packages' kernels for the work of ours, as baselines, where they are installed. None of their code is here.

An adapter hands a case its peers: it allocates what the package's own engine allocates per round, calls the package's
functions, and says how their results compare with the reference. Written for sglang 0.5.23,
flashinfer-python 0.7.2 and arctic-inference 0.3.0.
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
    """A module of a peer's; None without the package, or, said on stderr, where it does not import."""
    if find_spec(name.partition(".")[0]) is None:
        return None
    try:
        return import_module(name)
    except Exception as error:  # whatever an installation of another package may lack
        print(f"specdec bench: {name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def module(name: str, device: torch.device) -> Any:
    """One with kernels, which need a GPU."""
    return installed(name) if device.type == "cuda" else None


def that_run(*peers: Baseline) -> list[Baseline]:
    """Those whose call works here at all; the others, said on stderr, are left out."""
    working = []
    for peer in peers:
        try:
            peer.call()
        except Exception as error:  # whatever a package has not for these sizes or this device
            print(f"specdec bench: {peer.name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            working.append(peer)
    return working
