"""Inputs of a kernel of attention over paged KV, named as in `tree_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedTrees:
    """Trees after paged prefixes."""

    q: Tensor  # [B, N, Hq, D]
    k_pool: Tensor  # [pages, page_size, Hkv, D]
    v_pool: Tensor
    page_table: Tensor  # [B, max_pages] int32
    prefix_lens: Tensor  # [B] int32
    tree: Tensor  # [B, N, N] bool: which tail rows a row sees
    mask: Tensor  # [B, N, W] int64: `tree` as bits

    @property
    def page_size(self) -> int:
        return self.k_pool.shape[1]

    @property
    def seq_lens(self) -> Tensor:
        """KV rows including the tree's: [B] int32."""
        return self.prefix_lens + self.q.shape[1]


def rows_of_nodes(x: PagedTrees) -> tuple[Tensor, Tensor]:
    """Return the tail rows that each node attends to, as pages of one row [B * N, most], and their counts [B * N]."""
    nodes = x.q.shape[1]
    at = x.prefix_lens[:, None] + torch.arange(nodes, device=x.q.device)
    row_indices = x.page_table.gather(1, at // x.page_size) * x.page_size + at % x.page_size
    counts = x.tree.sum(-1, dtype=torch.int32).flatten()
    order = torch.argsort(~x.tree, dim=-1, stable=True)[..., : int(counts.max())]
    rows = row_indices[:, None].expand(-1, nodes, -1).gather(2, order).flatten(0, 1).int().contiguous()
    return rows, counts
