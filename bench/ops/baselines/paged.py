"""Inputs of a kernel of attention over paged KV, named as in `tree_attention`."""

from __future__ import annotations

from dataclasses import dataclass

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
