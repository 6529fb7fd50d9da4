"""What the ways to run a model have in common: transformers' module, which has the weights, and KV pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Rows
from .kv_pools import KvPools, KvScales, KvShape
from .kv_scales import checkpoint_scales, measured_scale

MEASURED_ROWS = 256  # from which the scales of 8-bit KV are measured


class HeldModel:
    """A module of transformers with the KV pools of its attention.

    Attributes:
        model: the module.
        max_len: the longest sequence to be served.
        pools: of the attention calls of a pass, in their order.
    """

    model: Any
    max_len: int
    pools: KvPools
    _config: Any

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

    def prefill(self, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor | None:
        raise NotImplementedError

    def resize_pools(self, num_pages: int) -> None:
        """Other pools, empty, with another number of pages."""
        self._hold(self.pools.with_pages(num_pages))

    def _hold(self, pools: KvPools) -> None:
        """These are the pools from now on."""
        self.pools = pools

    def _make_pools(
        self,
        source: str | Path | nn.Module,
        shapes: Sequence[KvShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        name: str,
        window_pages: Mapping[int, int],
    ) -> None:
        """Hold pools of `kv_dtype`, if it is given; where it is not that of the weights, with the scales of the model's
        checkpoint, or measured ones."""
        device = self.embedding.weight.device
        scales = None
        if kv_dtype not in (None, dtype):
            scales = checkpoint_scales(source, len(shapes), name)
            if scales is None:
                self._hold(KvPools.allocate(shapes, -(-MEASURED_ROWS // page_size), page_size, dtype, device))
                scales = self._measured_scales()
        self._hold(KvPools.allocate(shapes, num_pages, page_size, kv_dtype or dtype, device, scales, window_pages))

    @torch.inference_mode()
    def _measured_scales(self) -> list[KvScales]:
        """Scales measured from the keys and values that one pass leaves in the pools, which are not 8-bit yet."""
        count, device = min(MEASURED_ROWS, self.max_len), self.embedding.weight.device
        drawn = torch.randint(self.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        pages = torch.arange(self.pools.num_pages, dtype=torch.int32, device=device)[None]
        rows = Rows(slots=zero, page_table=pages, prefix_lens=zero, tail_len=count)
        positions = torch.arange(count, dtype=torch.int32, device=device)[None]
        self.prefill(drawn.to(device, torch.int32), positions, rows)
        return [KvScales(measured_scale(kv.k), measured_scale(kv.v)) for kv in self.pools.layers]
