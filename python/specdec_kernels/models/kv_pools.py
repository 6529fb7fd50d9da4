"""The KV pools of a model, as a value: which layers share a layout, and the tensors that hold their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import mla_tree_attention, move_kv, rope_qkv_write_kv, tree_attention, write_kv, write_latent


@dataclass(frozen=True)
class KvLayout(ABC):
    """The rows that a layer keeps of each token in paged pools, and the ops that work on it.

    A layout is a frozen dataclass: layers with equal layouts share pools. Ops take the arguments of `PagedBatch` by
    name.
    """

    @property
    @abstractmethod
    def window(self) -> int | None:
        """The number of rows that attend to a token, from its own on; None: all later ones."""

    @property
    @abstractmethod
    def row_shapes(self) -> Mapping[str, tuple[int, int]]:
        """The heads and elements of a row in each pool, by the pool's name."""

    @property
    def unit_scales(self) -> tuple[float, ...]:
        """Scales of 1 for each pool."""
        return (1.0,) * len(self.row_shapes)

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The name of each pool's scale in checkpoints with FP8 KV: "k" or "v"."""
        return tuple(self.row_shapes)

    @abstractmethod
    def write(self, kv: LayerKv, rows: Sequence[Tensor], **batch: Any) -> None:
        """Write rows [B, Q, heads, dim] or [M, heads, dim], one tensor for each pool, to a layer's pools."""

    @abstractmethod
    def attend(self, q: Tensor, kv: LayerKv, **batch: Any) -> Tensor:
        """Return the attention output of queries [B, Q, heads, dim] or [M, heads, dim] over a layer's pools.

        Its rows are as wide as values.
        """

    @abstractmethod
    def keys_and_values(self, pools: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the pools of one layer or of several as the two that ops on rows take."""

    def move(
        self,
        pools: Sequence[Tensor],
        page_table: Tensor,
        path: Tensor,
        num_valid: Tensor,
        prefix_lens: Tensor,
        *,
        slots: Tensor,
        status: Tensor,
    ) -> None:
        """Compact the rows of accepted paths in pools [layers, pages, page_size, heads, dim], as `move_kv` does."""
        keys, values = self.keys_and_values(pools)
        move_kv(keys, values, page_table, path, num_valid, prefix_lens, slots=slots, status=status)


@dataclass(frozen=True)
class KeyValueLayout(KvLayout):
    """A key and a value for each KV head."""

    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    @property
    def row_shapes(self) -> Mapping[str, tuple[int, int]]:
        return {"k": (self.heads, self.k_dim), "v": (self.heads, self.v_dim)}

    @property
    def unit_scales(self) -> KvScales:
        return KvScales()

    def write(self, kv: LayerKv, rows: Sequence[Tensor], **batch: Any) -> None:
        write_kv(*rows, *kv.pools, k_scale=kv.scales[0], v_scale=kv.scales[1], **batch)

    def rope_and_write(self, qkv: Tensor, rotations: Tensor, positions: Tensor, kv: LayerKv, **options: Any) -> Tensor:
        """Return rotated queries, and write rotated keys and values, by `rope_qkv_write_kv`."""
        k_pool, v_pool = kv.pools
        queries: Tensor = rope_qkv_write_kv(
            qkv, rotations, positions, k_pool, v_pool, k_scale=kv.scales[0], v_scale=kv.scales[1], **options
        )
        return queries

    def attend(self, q: Tensor, kv: LayerKv, **batch: Any) -> Tensor:
        out: Tensor = tree_attention(q, *kv.pools, k_scale=kv.scales[0], v_scale=kv.scales[1], **batch)
        return out

    def keys_and_values(self, pools: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = pools
        return keys, values


@dataclass(frozen=True)
class LatentLayout(KvLayout):
    """A row for each token that all heads share, as multi-head latent attention keeps it.

    Its first `latent_dim` elements are keys and values in one, the others are rotated and part of the keys alone.
    """

    latent_dim: int
    rope_dim: int
    window: int | None = None

    @property
    def row_shapes(self) -> Mapping[str, tuple[int, int]]:
        return {"latent": (1, self.latent_dim + self.rope_dim)}

    @property
    def scale_names(self) -> tuple[str, ...]:
        return ("k",)

    def write(self, kv: LayerKv, rows: Sequence[Tensor], **batch: Any) -> None:
        (scale,) = kv.scales
        write_kv(*halves(rows[0]), *self.keys_and_values(kv.pools), k_scale=scale, v_scale=scale, **batch)

    def normalize_and_write(self, rows: Tensor, norm: Tensor, kv: LayerKv, **options: Any) -> None:
        """Normalize, rotate and write rows [B, Q, dim] or [M, dim], by `write_latent`."""
        write_latent(rows, norm, kv.pools[0].squeeze(2), kv_scale=kv.scales[0], **options)

    def attend(self, q: Tensor, kv: LayerKv, *, soft_cap: float | None = None, **batch: Any) -> Tensor:
        assert soft_cap is None  # no such model caps its scores
        pool, scale = kv.pools[0].squeeze(2), kv.scales[0]
        out: Tensor = mla_tree_attention(q, pool, latent_dim=self.latent_dim, kv_scale=scale, **batch)
        return out

    def keys_and_values(self, pools: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return halves(pools[0])


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves of rows [..., dim], for ops that take keys and values."""
    left, right = rows.chunk(2, dim=-1)
    return left, right


class KvScales(NamedTuple):
    """What 1.0 in the FP8 pools of a layer's keys and values stands for; 1 for other pools."""

    k: float = 1.0
    v: float = 1.0


class LayerKv(NamedTuple):
    """The pools of one layer."""

    layout: KvLayout
    pools: tuple[Tensor, ...]  # [pages, page_size, heads, dim], in the order of `KvLayout.row_shapes`
    scales: tuple[float, ...]  # one for each pool
    window: int | None = None  # of the page table that lists its pages; None: the table of all other layers


@dataclass(frozen=True)
class KvGroup:
    """The pools of all layers with one layout."""

    layout: KvLayout
    layers: tuple[int, ...]  # their indices among the layers with KV
    pools: tuple[Tensor, ...]  # [len(layers), pages, page_size, heads, dim], in the order of `KvLayout.row_shapes`
    scales: tuple[tuple[float, ...], ...]  # of each of these layers
    window: int | None  # as in `LayerKv`

    @property
    def named_pools(self) -> dict[str, Tensor]:
        """The pools by their names in the layout."""
        return dict(zip(self.layout.row_shapes, self.pools, strict=True))

    def layer(self, index: int, scales: tuple[float, ...] | None = None) -> LayerKv:
        """Return the pools of layers[index], with its scales or with others."""
        pools = tuple(pool[index] for pool in self.pools)
        return LayerKv(self.layout, pools, self.scales[index] if scales is None else scales, self.window)


@dataclass(frozen=True)
class KvPools:
    """The KV rows of all layers of one model.

    Groups share one page table: row r of a slot lies at the same place in all of them, and each has `num_pages` pages.
    Groups with a window in `window_pages` have a table of their own for that window, give pages back once they lie
    outside it, and have that many pages, or `num_pages` if these are fewer.
    """

    groups: tuple[KvGroup, ...]
    num_pages: int
    window_pages: Mapping[int, int]

    @classmethod
    def allocate(
        cls,
        layouts: Sequence[KvLayout],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, ...]] | None = None,
        window_pages: Mapping[int, int] = MappingProxyType({}),
    ) -> KvPools:
        """Return pools for a layer of each of these layouts; without scales these are 1.

        Pools start as zeros, so that unwritten rows are no NaN in a debugger; no op reads them.
        """
        scales = scales or [layout.unit_scales for layout in layouts]

        groups = []
        for layout in dict.fromkeys(layouts):
            layers = tuple(layer for layer, own in enumerate(layouts) if own == layout)
            window = layout.window if layout.window in window_pages else None
            pages = pages_of(window, num_pages, window_pages)
            pools = tuple(
                torch.zeros(len(layers), pages, page_size, heads, dim, dtype=dtype, device=device)
                for heads, dim in layout.row_shapes.values()
            )
            groups.append(KvGroup(layout, layers, pools, tuple(scales[layer] for layer in layers), window))
        used = {window: most for window, most in window_pages.items() if any(g.window == window for g in groups)}
        return cls(tuple(groups), num_pages, used)

    def with_pages(self, num_pages: int) -> KvPools:
        """Return empty pools for the same layers, with another number of pages."""

        def resized(group: KvGroup) -> KvGroup:
            pages = pages_of(group.window, num_pages, self.window_pages)
            return replace(
                group, pools=tuple(pool.new_zeros(len(pool), pages, *pool.shape[2:]) for pool in group.pools)
            )

        return replace(self, groups=tuple(map(resized, self.groups)), num_pages=num_pages)

    def bytes_with(self, num_pages: int) -> int:
        """Return the bytes of `with_pages(num_pages)`."""
        pages = [pages_of(group.window, num_pages, self.window_pages) for group in self.groups]
        page_bytes = [sum(pool[:, :1].nbytes for pool in group.pools) for group in self.groups]
        return sum(n * size for n, size in zip(pages, page_bytes, strict=True))

    @property
    def layers(self) -> list[LayerKv]:
        """The pools of each layer of the model that has KV."""
        layers = {layer: group.layer(index) for group in self.groups for index, layer in enumerate(group.layers)}
        return [layers[layer] for layer in sorted(layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0].pools[0].dtype

    @property
    def device(self) -> torch.device:
        return self.groups[0].pools[0].device

    @property
    def page_size(self) -> int:
        return self.groups[0].pools[0].shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for group in self.groups for pool in group.pools)

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
        """Compact the KV of accepted paths in all layers; the tables are those of `PagedBatch`."""
        for group in self.groups:
            table = page_table if group.window is None else window_tables[group.window]
            group.layout.move(group.pools, table, path, num_valid, prefix_lens, slots=slots, status=status)


def pages_of(window: int | None, num_pages: int, window_pages: Mapping[int, int]) -> int:
    """Return the pages of pools whose table is this window's: at most `num_pages`, since no slot holds more there."""
    return num_pages if window is None else min(num_pages, window_pages[window])
