"""The KV pools of a model, as a value: which layers have rows of one shape, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
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
    window: int | None = None  # whose page table lists its pages; None: that of all windows without one of their own


@dataclass(frozen=True)
class KvGroup:
    """The pools of all layers that keep rows of one shape."""

    shape: KvShape
    layers: tuple[int, ...]  # of the model
    k: Tensor  # [len(layers), pages, page_size, heads, k_dim]
    v: Tensor  # [len(layers), pages, page_size, heads, v_dim]
    scales: tuple[KvScales, ...]  # of each of these layers
    window: int | None  # as of `LayerKv`


@dataclass(frozen=True)
class KvPools:
    """The KV rows of all layers of one model.

    Groups share one page table: row r of a slot lies at one place in all of them, which have `num_pages` pages each.
    But those with a window in `window_pages` have a table of their own for each window, behind which pages are given
    back, and that many pages, or `num_pages` if these are fewer.
    """

    groups: tuple[KvGroup, ...]
    num_pages: int
    window_pages: Mapping[int, int]

    @classmethod
    def allocate(
        cls,
        shapes: Sequence[KvShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] | None = None,
        window_pages: Mapping[int, int] = MappingProxyType({}),
    ) -> KvPools:
        """Pools for a layer of each of these shapes; None: scales of 1.

        They start as zeros only so that rows nobody wrote are no NaN in a debugger; no op reads them.
        """
        scales = scales or [KvScales()] * len(shapes)

        groups = []
        for shape in dict.fromkeys(shapes):
            layers = tuple(layer for layer, of_layer in enumerate(shapes) if of_layer == shape)
            window = shape.window if shape.window in window_pages else None
            pages = pages_of(window, num_pages, window_pages)
            k, v = (
                torch.zeros(len(layers), pages, page_size, shape.heads, dim, dtype=dtype, device=device)
                for dim in (shape.k_dim, shape.v_dim)
            )
            groups.append(KvGroup(shape, layers, k, v, tuple(scales[layer] for layer in layers), window))
        used = {window: most for window, most in window_pages.items() if any(g.window == window for g in groups)}
        return cls(tuple(groups), num_pages, used)

    def with_pages(self, num_pages: int) -> KvPools:
        """Other pools, empty, for the same layers, with another number of pages."""

        def resized(group: KvGroup) -> KvGroup:
            pages = pages_of(group.window, num_pages, self.window_pages)
            k, v = (pool.new_zeros(len(pool), pages, *pool.shape[2:]) for pool in (group.k, group.v))
            return replace(group, k=k, v=v)

        return replace(self, groups=tuple(map(resized, self.groups)), num_pages=num_pages)

    def bytes_with(self, num_pages: int) -> int:
        """What `with_pages` takes."""
        pages = [pages_of(group.window, num_pages, self.window_pages) for group in self.groups]
        return sum(n * (g.k[:, :1].nbytes + g.v[:, :1].nbytes) for n, g in zip(pages, self.groups, strict=True))

    @property
    def layers(self) -> list[LayerKv]:
        """The pools of each layer of the model."""
        of_layers = {
            layer: LayerKv(k, v, scales, group.window)
            for group in self.groups
            for layer, k, v, scales in zip(group.layers, group.k, group.v, group.scales, strict=True)
        }
        return [of_layers[layer] for layer in sorted(of_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0].k.dtype

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
        window_tables: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Compact the KV of accepted paths in all layers, by `move_kv`; the tables are those of `PagedBatch`."""
        for group in self.groups:
            table = page_table if group.window is None else window_tables[group.window]
            move_kv(group.k, group.v, table, path, num_valid, prefix_lens, slots=slots, status=status)


def pages_of(window: int | None, num_pages: int, window_pages: Mapping[int, int]) -> int:
    """Pages of pools whose table is that of this window: no more than of the others, since no slot holds more there."""
    return num_pages if window is None else min(num_pages, window_pages[window])
