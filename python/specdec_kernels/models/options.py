"""Options with which a language model is loaded, by any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .layers.reduction import LOCAL, Reduction
from .shard import WHOLE, Shard


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Weights, KV pools and features of a language model.

    Attributes:
        max_len: longest sequence in tokens; the model must allow it.
        num_pages, page_size: of the KV pools, in pages and in rows per page.
        dtype, device: of weights and pools.
        kv_dtype: of the pools. None: `dtype`. float8_e4m3fn: keys and values of each layer are divided by scales, those
            of the checkpoint or, if it has none, scales measured in one pass over tokens drawn from the vocabulary with
            a fixed seed.
        draft_prefixes: tensors of the checkpoint under these prefixes are a draft's, and are left to it.
        feature_layers: layers whose input states a pass returns as `features` (for EAGLE-3). The number of layers names
            the state that enters the final norm.
        adapter: folder of a LoRA to merge into the weights of a path or hub id.
        name: of the model in error messages.
        num_slots: sequences that have a recurrent state, of models with such layers.
        num_snapshots: further such states, for the prefix cache.
        max_nodes, accept_width: most nodes of a sequence's tree, and width of accepted paths, for these layers.
        window_pages: sliding windows whose layers have a page table of their own (`PagedBatch.window_tables`), and the
            number of pages of each.
        shard: this rank's share of the model, a native one. reduction: sums partial outputs over the ranks.
    """

    max_len: int
    num_pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    draft_prefixes: tuple[str, ...] = ()
    feature_layers: Sequence[int] = ()
    adapter: Path | None = None
    name: str = "model"
    num_slots: int = 1
    num_snapshots: int = 0
    max_nodes: int = 16
    accept_width: int = 16
    window_pages: Mapping[int, int] = field(default_factory=dict)
    shard: Shard = WHOLE
    reduction: Reduction = LOCAL

    def __post_init__(self) -> None:
        if self.shard != WHOLE and self.reduction is LOCAL:
            raise ValueError(
                f"{self.name}: reduction is LOCAL, expected one that sums the outputs of {self.shard.size} ranks"
            )
