"""A test double of a recurrent mixer: its state is the number of tokens that it has seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.state_cache import LayerState, StateSpec


@dataclass
class CountingMixer:
    """Outputs the number of tokens on each row's path, the row included. Requests have Q rows each."""

    out: Linear  # [H, 1]
    cache: LayerState = field(init=False)

    @property
    def cache_spec(self) -> StateSpec:
        return StateSpec(((),), (torch.int64,))

    def write_cache(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return the counts [B, Q]; a tree's become those of its nodes, a prompt's the committed ones."""
        (committed,), (nodes,) = self.cache
        slots, count = batch.slots.long(), positions.shape[1]
        if batch.mask is None:
            counts = committed[slots][:, None] + torch.arange(1, count + 1)
            committed[slots] += count if batch.num_valid is None else batch.num_valid
        else:
            on_path = (batch.mask[..., :1] >> torch.arange(64)) & 1
            counts = committed[slots][:, None] + on_path.sum(-1)
            nodes[slots, :count] = counts
        return counts

    def __call__(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        return self.write_cache(x, positions, batch).reshape(-1, 1).to(x.dtype)
