"""The base of all backends: the module of transformers, which holds the weights, and KV pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..cache_division import CacheDivision
from ..kv_pools import KvLayout, KvPools
from ..layers.paged_batch import LastRows, PagedBatch
from ..options import ModelOptions
from ..state_cache import StateCache
from ..weights.kv_scales import checkpoint_scales, measured_scale
from ..weights.offload import offload, onload, unfuse_quantized, weights_of
from ..weights.update import Skeleton, Update, updates_of

MEASURED_ROWS = 256  # tokens whose KV the scales of 8-bit KV are measured from


class PagedModel:
    """A module of transformers with the KV pools of its attention.

    Attributes:
        model: the module.
        is_given: whether the module is the caller's, and not loaded here.
        max_len: the longest sequence to be served.
        pools: KV pools of the attention calls of a pass, in their order.
        states: the cache of the layers that keep a recurrent state; None: there are none.
        caches: how ranks divide pools and states; None: the model is whole.
    """

    model: Any
    max_len: int
    pools: KvPools
    states: StateCache | None = None
    caches: CacheDivision | None = None
    is_given: bool
    _config: Any
    _device: torch.device
    _num_states: tuple[int, int]  # of slots and snapshots, while it sleeps
    _skeleton: Skeleton | None = None

    @property
    def config(self) -> Any:
        return self._config

    @property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def expands_latents(self, chunks: Sequence[tuple[int, int]]) -> bool:
        return False

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        last: LastRows | None = None,
        *,
        all_rows: bool = False,
    ) -> Any:
        raise NotImplementedError

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """Return the updates of this model's weights, as `updates_of` does. Call `refresh` after writing them."""
        if self._skeleton is None:
            self._skeleton = Skeleton(self.model)
        return updates_of(self.model, self._skeleton, weights, self.pools, name)

    def refresh(self) -> None:
        """Recompute, in place, what was made of weights."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the weights that may be offloaded; none of a module that the caller gave."""
        return {} if self.is_given else weights_of(self.model)

    def sleep(self, level: int) -> None:
        """Drop pools and states, and offload the weights to host memory (1) or drop them (2)."""
        if self.states is not None:
            self._num_states = self.states.num_slots, self.states.num_snapshots
            self.states = self.states.with_slots(0)
        self.resize_pools(0)
        self._device = self.embedding.weight.device
        if self._offloads(level):
            self._drop_parts()
            offload(self.weights, drop=level == 2)

    def wake(self, level: int, num_pages: int) -> None:
        """Undo `sleep`, with empty pools; weights that were dropped are zeros."""
        if self._offloads(level):
            onload(self.weights, self._device, dropped=level == 2)
            self._make_parts()
        if self.states is not None:
            self.states = self.states.with_slots(*self._num_states)
        self.resize_pools(num_pages)

    def _offloads(self, level: int) -> bool:
        return not self.is_given and (level == 2 or self._device.type != "cpu")

    def _drop_parts(self) -> None:
        """Let go of all references to weights but the module's."""
        unfuse_quantized(self.model)

    def _make_parts(self) -> None:
        """Make what a pass computes with from the module."""

    def commit_path(
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
        """Make the accepted path of each request's tree part of its cache, KV rows and recurrent states alike."""
        self.pools.move(
            page_table, path, num_valid, prefix_lens, slots=slots, status=status, window_tables=window_tables
        )
        if self.states is not None:
            self.states.move(path, num_valid, slots=slots, status=status)

    def begin(self, slot: int) -> None:
        """Let the next pass of a slot begin a sequence."""
        if self.states is not None:
            self.states.begin(slot)

    def resize_pools(self, num_pages: int) -> None:
        """Replace the pools by empty ones of another number of pages."""
        self._hold(self.pools.with_pages(num_pages))

    def _hold(self, pools: KvPools) -> None:
        """Use these pools from now on."""
        self.pools = pools

    def _make_pools(self, source: str | Path | nn.Module, layouts: Sequence[KvLayout], options: ModelOptions) -> None:
        """Allocate pools of `kv_dtype`.

        If it differs from `dtype`, their scales are those of the source's checkpoint, or are measured.
        """
        self.is_given = isinstance(source, nn.Module)
        page_size, dtype = options.page_size, options.dtype
        kv_dtype, device = options.kv_dtype or dtype, self.embedding.weight.device
        scales: Sequence[tuple[float, ...]] | None = None
        if kv_dtype != dtype:
            scales = checkpoint_scales(source, layouts, options.name)
            if scales is None:
                self._hold(KvPools.allocate(layouts, -(-MEASURED_ROWS // page_size), page_size, dtype, device))
                scales = self._measured_scales()
        sizes = options.num_pages, page_size
        self._hold(KvPools.allocate(layouts, *sizes, kv_dtype, device, scales, options.window_pages))

    @torch.inference_mode()
    def _measured_scales(self) -> list[tuple[float, ...]]:
        """Measure scales from the keys and values that one pass writes to pools of `dtype`."""
        count, device = min(MEASURED_ROWS, self.max_len), self.embedding.weight.device
        drawn = torch.randint(self.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        pages = torch.arange(self.pools.num_pages, dtype=torch.int32, device=device)[None]
        rows = PagedBatch(slots=zero, page_table=pages, prefix_lens=zero, tail_len=count)
        positions = torch.arange(count, dtype=torch.int32, device=device)[None]
        self.prefill(drawn.to(device, torch.int32), positions, rows)
        scales = [tuple(map(measured_scale, kv.pools)) for kv in self.pools.layers]
        if self.caches is None:
            return scales
        # Ranks have other heads: all take the largest.
        own = torch.tensor(scales, device=device)
        every = self.caches.reduction.gather(own.view(-1)).view(self.caches.shard.size, *own.shape)
        return [tuple(each) for each in every.amax(0).tolist()]
