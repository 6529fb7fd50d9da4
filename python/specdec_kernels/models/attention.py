"""Our attention as a function of transformers' attention interface.

A model loaded with `attn_implementation="specdec"` runs its own Hugging Face code up to the attention, then calls
`paged_attention` below, which writes the new K/V rows into the layer's pools and attends over them. Everything the
call needs beyond q, k, v travels as one keyword argument, `rows`, that the model passes through untouched.

The pools hang on each layer's `self_attn` as non-persistent buffers, so that a compiled layer sees them as inputs and
one graph serves all layers (reading `module.layer_idx` here would compile every layer anew).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

from .. import torch_ops

IMPLEMENTATION = "specdec"


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


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Q, D], key and value [B, Hkv, Q, D] as transformers hands them over; returns [B, Q, Hq, D]."""
    torch_ops.write_kv(
        key.transpose(1, 2),
        value.transpose(1, 2),
        module.k_pool,
        module.v_pool,
        rows.page_table,
        rows.prefix_lens,
        row_offset=rows.row_offset,
        slots=rows.slots,
        num_valid=rows.num_valid,
        status=rows.status,
    )
    out = torch_ops.tree_attention(
        query.transpose(1, 2),
        module.k_pool,
        module.v_pool,
        rows.page_table,
        rows.prefix_lens,
        slots=rows.slots,
        q_lens=rows.num_valid,
        tail_len=rows.tail_len,
        mask=rows.mask,
        scale=scaling,
        status=rows.status,
    )
    return out, None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


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
