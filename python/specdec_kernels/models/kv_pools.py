"""The KV pools of a model, as a value: which layers have rows of one shape, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import move_kv


class KvShape(NamedTuple):
    """What one layer keeps of a token, and for how long."""

    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None  # rows behind which nothing is seen any more; None: all are


class KvScales(NamedTuple):
    """What a number 1.0 in the 8-bit pools of one layer stands for; 1 for other pools."""

    k: float = 1.0
    v: float = 1.0


class LayerKv(NamedTuple):
    """The pools of one layer."""

    k: Tensor  # [pages, page_size, heads, k_dim]
    v: Tensor  # [pages, page_size, heads, v_dim]
    scales: KvScales


@dataclass(frozen=True)
class KvGroup:
    """The pools of all layers that keep rows of one shape."""

    shape: KvShape
    layers: tuple[int, ...]  # of the model
    k: Tensor  # [len(layers), pages, page_size, heads, k_dim]
    v: Tensor  # [len(layers), pages, page_size, heads, v_dim]
    scales: tuple[KvScales, ...]  # of each of these layers


@dataclass(frozen=True)
class KvPools:
    """The KV rows of all layers of one model.

    Groups have equally many pages and share one page table today: row r of a slot lies at one place in all of them. A
    table for each window comes with pages that are freed behind it, which is why a window parts groups.
    """

    groups: tuple[KvGroup, ...]

    @classmethod
    def allocate(
        cls,
        shapes: Sequence[KvShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] | None = None,
    ) -> KvPools:
        """Pools for a layer of each of these shapes; None: scales of 1.

        They start as zeros only so that rows nobody wrote are no NaN in a debugger; no op reads them.
        """
        scales = scales or [KvScales()] * len(shapes)

        def zeros(count: int, heads: int, dim: int) -> Tensor:
            return torch.zeros(count, num_pages, page_size, heads, dim, dtype=dtype, device=device)

        groups = []
        for shape in dict.fromkeys(shapes):
            layers = tuple(layer for layer, of_layer in enumerate(shapes) if of_layer == shape)
            k, v = (zeros(len(layers), shape.heads, dim) for dim in (shape.k_dim, shape.v_dim))
            groups.append(KvGroup(shape, layers, k, v, tuple(scales[layer] for layer in layers)))
        return cls(tuple(groups))

    def with_pages(self, num_pages: int) -> KvPools:
        """Other pools, empty, for the same layers, with another number of pages."""

        def zeros(pool: Tensor) -> Tensor:
            return pool.new_zeros(len(pool), num_pages, *pool.shape[2:])

        return KvPools(tuple(replace(group, k=zeros(group.k), v=zeros(group.v)) for group in self.groups))

    @property
    def layers(self) -> list[LayerKv]:
        """The pools of each layer of the model."""
        of_layers = {
            layer: LayerKv(k, v, scales)
            for group in self.groups
            for layer, k, v, scales in zip(group.layers, group.k, group.v, group.scales, strict=True)
        }
        return [of_layers[layer] for layer in sorted(of_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0].k.dtype

    @property
    def num_pages(self) -> int:
        return self.groups[0].k.shape[1]

    @property
    def page_size(self) -> int:
        return self.groups[0].k.shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(group.k.nbytes + group.v.nbytes for group in self.groups)

    def move(
        self,
        page_table: Tensor,
        path: Tensor,
        num_valid: Tensor,
        prefix_lens: Tensor,
        *,
        slots: Tensor,
        status: Tensor,
    ) -> None:
        """`move_kv` in all layers: brings the rows of an accepted path together."""
        for group in self.groups:
            move_kv(group.k, group.v, page_table, path, num_valid, prefix_lens, slots=slots, status=status)
