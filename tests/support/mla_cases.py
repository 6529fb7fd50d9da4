"""Random latent caches for multi-head latent attention."""

from __future__ import annotations

import dataclasses

import torch

from support.attention_cases import make_cache

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class LatentCache:
    """A pool of latent rows and a page table; rows and entries that no request owns are poisoned."""

    kv_pool: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kv_pool, self.page_table, self.prefix_lens


def rows_of_656_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Quantize latent rows [.., 576] to the published format [.., 656]."""
    groups = rows[..., :512].unflatten(-1, (4, 128)).float()
    factors = groups.nan_to_num(448.0, 448.0, 448.0).abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    latent = (groups / factors).flatten(-2).to(FP8)
    rope = rows[..., 512:].to(torch.bfloat16).contiguous()
    return torch.cat([x.contiguous().view(torch.uint8) for x in (latent, factors.squeeze(-1), rope)], -1)


def make_latent_cache(
    prefix_lens: list[int],
    tails: list[int],
    *,
    page_size: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
    rows: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LatentCache:
    """Return a cache of prefix_lens[s] + tails[s] latent rows for slot s; uint8 is the format of 656 bytes."""
    dtype = torch.float32 if rows == torch.uint8 else rows
    cache = make_cache(prefix_lens, tails, page_size=page_size, kv_heads=1, head_dim=latent_dim + rope_dim, dtype=dtype)
    pool = cache.k_pool.squeeze(2)
    if rows == torch.uint8:
        pool = rows_of_656_bytes(pool)
    return LatentCache(pool.to(device), cache.page_table.to(device), cache.prefix_lens.to(device))


def random_lists(counts: list[int], rows: int, entries: int) -> torch.Tensor:
    """Return index lists [B, rows, entries] of distinct rows below counts[b], shuffled among entries of -1."""
    lists = torch.full((len(counts), rows, entries), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for i in range(rows):
            chosen = torch.randperm(count)[: int(torch.randint(0, min(count, entries) + 1, ()))]
            lists[b, i, torch.randperm(entries)[: len(chosen)]] = chosen.int()
    return lists


def mask_of_lists(lists: torch.Tensor, count: int) -> torch.Tensor:
    """Return the dense mask [B, rows, count] of index lists."""
    dense = torch.zeros(*lists.shape[:-1], count + 1, dtype=torch.bool)
    return dense.scatter(-1, lists.long() % (count + 1), torch.ones_like(lists, dtype=torch.bool))[..., :count]
