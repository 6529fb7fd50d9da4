"""The division of a model's caches among ranks: KV rows by heads, recurrent states by heads and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_pools import KeyValueLayout, KvLayout
from .layers.reduction import Reduction
from .shard import Shard


class DividedDim(NamedTuple):
    """A dimension of a tensor whose elements ranks divide by heads.

    Attributes:
        dim: counted from the last, which is -1.
        parts: of the whole dimension, next to each other: (heads, elements of each).
    """

    dim: int
    parts: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Return the elements of the whole dimension."""
        return sum(heads * elements for heads, elements in self.parts)

    def whole_shape(self, own: Sequence[int]) -> list[int]:
        """Return the shape of a whole tensor, from that of a rank's part."""
        shape = list(own)
        shape[self.dim] = self.size
        return shape

    def part(self, whole: Tensor, shard: Shard) -> Tensor:
        """Return a copy of a rank's part."""
        first, *others = (whole.narrow(self.dim, own.start, len(own)) for own in shard.ranges(self.parts, "heads"))
        return torch.cat([first, *others], self.dim) if others else first.clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of all ranks' parts. Ranks that replicate heads have the same elements."""
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            begin = 0
            for own in Shard(rank, len(parts)).ranges(self.parts, "heads"):
                whole.narrow(self.dim, own.start, len(own)).copy_(part.narrow(self.dim, begin, len(own)))
                begin += len(own)
        return whole


@dataclass(frozen=True)
class CacheDivision:
    """The division of a model's caches among ranks, and their exchange.

    Latent rows, and states of convolutions without heads, are replicated.

    Attributes:
        shard: of this rank.
        reduction: over the ranks.
        kv_heads: of each layer of the whole model.
        conv_parts: (heads, elements of each) of the channels of convolutions; empty: they are not divided.
    """

    shard: Shard
    reduction: Reduction
    kv_heads: int
    conv_parts: tuple[tuple[int, int], ...] = ()

    def whole(self, layout: KvLayout) -> KvLayout:
        """Return the layout of the whole model's rows."""
        return replace(layout, heads=self.kv_heads) if isinstance(layout, KeyValueLayout) else layout

    def of_rows(self, layout: KvLayout) -> DividedDim | None:
        """Return how rows [..., heads, dim] are divided; None: they are replicated."""
        return DividedDim(-2, ((self.kv_heads, 1),)) if isinstance(layout, KeyValueLayout) else None

    def of_state(self, own: Tensor) -> DividedDim | None:
        """Return how a tensor of `StateCache.kept` is divided, by this rank's; None: it is replicated."""
        if not self.conv_parts:
            return None
        if own.dim() == 3:  # [num_slots, width - 1, channels]
            return DividedDim(-1, self.conv_parts)
        return DividedDim(-3, ((own.shape[-3] * self.shard.size, 1),))

    def gather(self, own: Tensor, divided: DividedDim | None) -> Tensor | None:
        """Return, on rank 0, the whole of a tensor that all ranks have a part of."""
        parts = [own]
        if divided is not None and own.numel():
            rows = self.reduction.gather(own.contiguous().view(-1).view(torch.uint8)).view(self.shard.size, -1)
            parts = [row.view(own.dtype).view(own.shape) for row in rows]
        if self.shard.rank:
            return None
        return own if divided is None else divided.join(parts)

    def scatter(self, whole: Tensor | None, shape: Sequence[int], like: Tensor, divided: DividedDim | None) -> Tensor:
        """Return this rank's part of a tensor that rank 0 has.

        Args:
            whole: the tensor on rank 0; None on the others.
            shape: of the whole.
            like: has the dtype and the device.
            divided: as `of_rows` and `of_state` return; None: every rank gets the whole.
        """
        given = self.reduction.broadcast(whole, shape, like.dtype, like.device)
        return given if divided is None else divided.part(given, self.shard)
