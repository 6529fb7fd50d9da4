"""A test double of a KV layout: one latent row for each token, as multi-head latent attention keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.models.kv_pools import KvLayout, LayerKv


@dataclass(frozen=True)
class LatentLayout(KvLayout):
    """A row of `rank` latent elements and `rope` rotated ones, shared by all heads; float32, one request at a time."""

    rank: int
    rope: int
    window: int | None = None

    @property
    def row_shapes(self) -> Mapping[str, tuple[int, int]]:
        return {"latent": (1, self.rank + self.rope)}

    def write(self, kv: LayerKv, rows: Sequence[Tensor], **batch: Any) -> None:
        (pool,), (latent,) = kv.pools, rows
        page_size, row_offset, num_valid = pool.shape[1], batch.get("row_offset", 0), batch.get("num_valid")
        for b, slot in enumerate(batch["slots"].tolist()):
            begin = int(batch["prefix_lens"][slot]) + row_offset
            count = latent.shape[1] if num_valid is None else int(num_valid[b])
            for j in range(count):
                page = int(batch["page_table"][slot, (begin + j) // page_size])
                pool[page, (begin + j) % page_size] = latent[b, j]

    def rows(self, pool: Tensor, page_table: Tensor, slot: int, count: int) -> Tensor:
        """Return the first rows [count, rank + rope] of a slot."""
        pages = page_table[slot, : -(-count // pool.shape[1])].long()
        return pool[pages].flatten(0, 1)[:count, 0]

    def attend(self, q: Tensor, kv: LayerKv, **batch: Any) -> Tensor:
        """Return [B, Q, heads, rank]: scores over whole rows, values from the latent part (the absorbed form)."""
        outs = []
        for b, slot in enumerate(batch["slots"].tolist()):
            prefix, tail = int(batch["prefix_lens"][slot]), batch["tail_len"]
            rows = self.rows(kv.pools[0], batch["page_table"], slot, prefix + tail)
            visible = torch.ones(q.shape[1], prefix + tail, dtype=torch.bool)
            if batch["mask"] is None:
                visible[:, prefix:] = torch.ones(q.shape[1], tail).tril(tail - q.shape[1]).bool()
            else:
                visible[:, prefix:] = (batch["mask"][b, :, :1] >> torch.arange(tail)) & 1 == 1
            scores = torch.einsum("qhd,kd->hqk", q[b], rows) * batch["scale"]
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,kd->qhd", weights, rows[:, : self.rank]))
        return torch.stack(outs)

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
        (pool,) = pools
        page_size = pool.shape[2]
        for b, slot in enumerate(slots.tolist()):
            prefix, table = int(prefix_lens[slot]), page_table[slot]
            for j, row in enumerate(path[b, : int(num_valid[b])].tolist()):
                source, target = prefix + row, prefix + j
                pool[:, int(table[target // page_size]), target % page_size] = pool[
                    :, int(table[source // page_size]), source % page_size
                ]
