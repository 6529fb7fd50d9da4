"""The engine options that the flags of a command give."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import EngineOptions

# Flags of all commands that hand their value to an option of the engine as it is.
OPTIONS = {
    "adapter": "adapter",
    "batch_invariant": "batch_invariant",
    "chunked_prefill_size": "prefill_chunk",
    "device": "device",
    "enable_deterministic_inference": "batch_invariant",
    "kv_cache_dtype": "kv_dtype",
    "kv_dtype": "kv_dtype",
    "mem_fraction": "mem_fraction",
    "page_size": "page_size",
    "tokenizer_path": "tokenizer",
    "trust_remote_code": "trust_remote_code",
    "tuning": "tuning",
}


def options_of(args: argparse.Namespace, **others: Any) -> EngineOptions:
    """Return the engine options that the flags of a command give; flags that are absent or None leave the default.

    Args:
        others: options that the command derives itself.
    """
    import torch

    from ..engine import EngineOptions

    given = {name: value for flag, name in OPTIONS.items() if (value := getattr(args, flag, None)) is not None}
    if args.dtype is not None:
        given["dtype"] = getattr(torch, args.dtype)
    if getattr(args, "disable_cuda_graph", False) or getattr(args, "no_cuda_graph", False):
        given["cuda_graph"] = False
    return EngineOptions(**given | others)
