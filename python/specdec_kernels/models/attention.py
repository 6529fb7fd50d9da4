"""What every layer's attention shares: where rows stand, and the pools of a model's KV."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Rows(NamedTuple):
    """Which KV rows a forward pass writes and sees; the letters are those of `tree_attention`.

    Row j of request b is written at KV row `prefix_lens[slot] + row_offset + j` if j < num_valid[b]. It sees the
    prefix and, of the `tail_len` rows behind it, those its mask names (no mask: a causal chain).
    """

    slots: Tensor  # [B] int32
    page_table: Tensor  # [num_slots, max_pages] int32
    prefix_lens: Tensor  # [num_slots] int32
    tail_len: int
    row_offset: int = 0
    mask: Tensor | None = None  # [B, Q, W] int64
    num_valid: Tensor | None = None  # [B] int32
    status: Tensor | None = None  # [num_slots] int32
    fixed_split: int | None = None


class KvPools(NamedTuple):
    """The KV rows of all layers of one model: [layers, pages, page_size, Hkv, D] each."""

    k: Tensor
    v: Tensor

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def attach_pools(
    attentions: list[nn.Module], num_kv_heads: int, head_dim: int, num_pages: int, page_size: int, like: Tensor
) -> KvPools:
    """Allocate pools in the dtype and on the device of `like`, and hang layer i's on attentions[i].

    The pools start as zeros only so that rows nobody wrote are no NaN in a debugger; no op reads them.
    """
    shape = (len(attentions), num_pages, page_size, num_kv_heads, head_dim)
    pools = KvPools(like.new_zeros(shape), like.new_zeros(shape))
    for layer, attention in enumerate(attentions):
        attention.register_buffer("k_pool", pools.k[layer], persistent=False)
        attention.register_buffer("v_pool", pools.v[layer], persistent=False)
    return pools


def resize_pools(attentions: list[nn.Module], pools: KvPools, num_pages: int) -> KvPools:
    """Other pools in their place, empty, with another number of pages."""
    _, _, page_size, num_kv_heads, head_dim = pools.k.shape
    return attach_pools(attentions, num_kv_heads, head_dim, num_pages, page_size, like=pools.k)
