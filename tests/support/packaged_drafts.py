"""Drafts of the packaged models by name, one of each kind, small enough for many engines."""

from __future__ import annotations

from collections.abc import Callable

from specdec_kernels.engine import Draft, Eagle3, Ngram, Standalone, Union
from specdec_kernels.tiny import tiny_model

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(num_nodes=8),
    "eagle3-chain": lambda: Eagle3(HEAD, num_steps=3, topk=1),
    "eagle3-tree": lambda: Eagle3(HEAD, num_steps=4, topk=4, num_nodes=16),
    "eagle3+ngram": lambda: Union(Eagle3(HEAD, num_steps=3, topk=4, num_nodes=16), Ngram(num_nodes=16), num_nodes=16),
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
}
