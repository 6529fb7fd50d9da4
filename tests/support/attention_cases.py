"""Random trees and KV caches for tree attention."""

from __future__ import annotations

import dataclasses

import torch

NAN = float("nan")
WILD = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclasses.dataclass
class Cache:
    """Pools and a page table; rows and entries that no request owns are poisoned."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.k_pool, self.v_pool, self.page_table, self.prefix_lens


def make_cache(
    prefix_lens: list[int],
    tails: list[int],
    *,
    page_size: int,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Cache:
    """Return a cache of prefix_lens[s] + tails[s] rows for slot s, on shuffled pages of the second of three layers."""
    counts = [-(-(prefix + tail) // page_size) for prefix, tail in zip(prefix_lens, tails, strict=True)]
    num_pages, max_pages = sum(counts) + 3, max(counts, default=0) + 2
    free = torch.randperm(num_pages).tolist()
    table = torch.tensor(WILD)[torch.randint(0, len(WILD), (len(prefix_lens), max_pages))].to(torch.int32)
    k, v = (torch.full((3, num_pages, page_size, kv_heads, head_dim), NAN) for _ in "kv")
    v[:, ::2] = float("inf")
    for slot, count in enumerate(counts):
        for i in range(count):
            table[slot, i] = page = free.pop()
            rows = min(page_size, prefix_lens[slot] + tails[slot] - i * page_size)
            k[1, page, :rows] = torch.randn(rows, kv_heads, head_dim)
            v[1, page, :rows] = torch.randn(rows, kv_heads, head_dim)
    lens = torch.tensor(prefix_lens, dtype=torch.int32)
    return Cache(k.to(dtype).to(device)[1], v.to(dtype).to(device)[1], table.to(device), lens.to(device))


def pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., tail] into int64 words [..., ceil(tail / 64)]."""
    words = torch.zeros(*visible.shape[:-1], -(-visible.shape[-1] // 64), dtype=torch.int64)
    for j in range(visible.shape[-1]):
        words[..., j // 64] |= visible[..., j].long() << (j % 64)
    return words


def random_tree(nodes: int) -> torch.Tensor:
    """Return mask words of a tree with random parents: each node sees its ancestors and itself."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        visible[i] |= visible[int(torch.randint(0, i, ()))]
    return pack_bits(visible)


def random_trees(batch: int, nodes: int) -> torch.Tensor:
    return torch.stack([random_tree(nodes) for _ in range(batch)])
