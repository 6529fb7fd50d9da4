"""The attention of a pass of the transformers backend: over paged KV, by our kernel or by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kv_pools import LayerKv
from ..layers.paged_batch import PagedBatch
from .attention_hook import AttentionSpec, MaskKind


class PagedPass:
    """The attention hook of one pass over tokens [B, Q], or packed ones [M].

    Args:
        specs: the attention calls of the pass, in their order.
        kv: the pools of each call.
        marker: returned for each mask that the model asks for.
        shape: of the tokens.
        places: position of each token in its text [T].
        batch: where their rows are.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv: Sequence[LayerKv],
        marker: Tensor,
        shape: torch.Size,
        places: Tensor,
        batch: PagedBatch,
    ):
        self._specs, self._kv, self._marker, self._shape, self._batch = specs, kv, marker, shape, batch
        self._places = places
        self._next = 0
        self._angles: tuple[Tensor, Tensor] | None = None  # cosines and sines, as the model passes them
        # The same for `rope_qkv_write_kv`: a table, and each token's position in it.
        self._table, self._positions = marker, marker

    def mask(self, options: dict[str, Any]) -> Tensor:
        return self._marker

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if self._next == len(self._specs) or not self._specs[self._next].is_rotated:
            out: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
            return out
        cosines, sines = arguments
        if self._angles is None or self._angles[0] is not cosines or self._angles[1] is not sines:
            self._angles, half = (cosines, sines), q.shape[-1] // 2
            self._table = torch.cat([cosines[0, :, :half], sines[0, :, :half]], -1).float()
            self._positions = torch.arange(len(self._table), dtype=torch.int32, device=q.device).view(self._shape)
        return q, k  # `attend` rotates them

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        spec, kv = self._specs[self._next], self._kv[self._next]
        assert module is spec.module
        self._next += 1
        scale = options.get("scaling") or k.shape[3] ** -0.5
        sink, soft_cap = options.get("s_aux"), options.get("softcap")
        if spec.temperature is not None:
            q = spec.temperature.scaled(q, self._places)

        queries = self._rope_and_write(q, k, v, kv) if spec.is_rotated else self._write(q, k, v, kv, spec.head_dim)
        if spec.is_gathered:
            out = gathered_attention(queries, spec.mask, kv, self._batch, scale, soft_cap, sink)
        else:
            sinks = None if sink is None else sink.float()
            out = self._batch.attend(queries, kv, scale=scale, window=spec.window, soft_cap=soft_cap, sinks=sinks)
        return out.flatten(0, -3)[None, ..., : spec.v_dim].to(q.dtype).contiguous()

    def _rope_and_write(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv) -> Tensor:
        """Return rotated queries [*shape, heads, head_dim] of q [1, heads, T, D], and write rotated keys and values."""
        qkv = torch.cat([x[0].transpose(0, 1) for x in (q, k, v)], 1).to(self._marker.dtype)
        return self._batch.rope_and_write(qkv.view(*self._shape, *qkv.shape[1:]), self._table, self._positions, kv)

    def _write(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKv, head_dim: int) -> Tensor:
        """Return queries [*shape, heads, head_dim] of q [1, heads, T, D], and write keys and values."""

        def laid_out(x: Tensor) -> Tensor:
            """Return [*shape, heads, head_dim] of x [1, heads, T, D]."""
            x = x[0].transpose(0, 1).to(self._marker.dtype)
            if x.shape[2] < head_dim:  # padding by 0 would copy
                x = functional.pad(x, (0, head_dim - x.shape[2]))
            return x.reshape(*self._shape, *x.shape[1:])

        self._batch.write(kv, laid_out(k), laid_out(v))
        return laid_out(q)


def gathered_attention(
    q: Tensor, kind: MaskKind, kv: LayerKv, batch: PagedBatch, scale: float, soft_cap: float | None, sink: Tensor | None
) -> Tensor:
    """Compute `tree_attention` for q [B, Q, heads, D] or [M, heads, D], chunks included, by torch.

    The KV of each request is gathered from its pages, one request after the other. Outputs of padding rows are finite.
    """
    ends = batch.cu_seqlens_q
    if ends is None:
        assert batch.tail_len is not None
        tails = torch.full_like(batch.slots, batch.tail_len)
        return gathered_rows(q, tails, batch.mask, kind, kv, batch, scale, soft_cap, sink)
    # As [B, Q], where Q is the most rows of any request. A request's rows beyond its own are dropped again.
    tails = ends[1:] - ends[:-1]
    most = len(q) if q.is_cuda else int(tails.max())  # on the CPU, reading lengths waits for nothing
    rows = (ends[:-1, None] + torch.arange(most, device=q.device)).clamp(0, len(q) - 1)
    mask = None if batch.mask is None else batch.mask[rows]
    out = gathered_rows(q[rows], tails, mask, kind, kv, batch, scale, soft_cap, sink)
    at = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(ends[1:].contiguous(), at.to(ends.dtype), right=True).clamp(max=len(tails) - 1)
    return out[request, (at - ends[request]).clamp(0, most - 1)]


def gathered_rows(
    q: Tensor,
    tails: Tensor,
    mask: Tensor | None,
    kind: MaskKind,
    kv: LayerKv,
    batch: PagedBatch,
    scale: float,
    soft_cap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Return [B, Q, heads, D] for q [B, Q, heads, D]. Request b has tails[b] rows after its prefix."""
    num_requests, length, heads, _ = q.shape
    num_pages, page_size = kv.pools[0].shape[:2]
    table = batch.table_of(kv)
    capacity = table.shape[1] * page_size
    width = min(capacity, batch.max_kv_len or capacity)
    if not q.is_cuda:
        width = min(width, max(1, int(batch.prefix_lens.max()) + int(tails.max())))
    at = torch.arange(width, device=q.device)
    slots = batch.slots.long().clamp(0, len(batch.prefix_lens) - 1)
    outs = []
    for b in range(num_requests):
        prefix = batch.prefix_lens[slots[b]].long()
        pages = table[slots[b], : -(-width // page_size)].long().clamp(0, num_pages - 1)
        k, v = (
            (pool[pages].flatten(0, 1)[:width].to(q.dtype) * kv_scale).repeat_interleave(heads // pool.shape[2], 1)
            for pool, kv_scale in zip(kv.pools, kv.scales, strict=True)
        )
        node = at - prefix
        if mask is None:
            before = 0 if batch.cu_seqlens_q is not None else tails[b] - length
            on_path = node <= torch.arange(length, device=q.device)[:, None] + before
        else:
            words = mask[b][:, node.clamp(0, 64 * mask.shape[2] - 1) // 64]
            on_path = (words >> (node.clamp(min=0) % 64) & 1).bool()
        visible = (node < 0) | (on_path & (node < tails[b]))
        # Rows of a path rise along it, so a row's position is the number of visible rows before it.
        position = visible.cumsum(1) - 1
        last = position[:, -1:]
        if kind.kind == "window":
            visible = visible & (position > last - kind.size)
        elif kind.kind == "chunk":
            visible = visible & (position // kind.size == last // kind.size)
        # An unwritten row may hold anything, NaN included.
        used = visible.any(0)[:, None, None]
        k, v = k.where(used, 0), v.where(used, 0)
        scores = torch.einsum("qhd,khd->hqk", q[b], k).float() * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.float()[:, None, None].expand(-1, length, 1)], 2)
        weights = scores.softmax(2)[:, :, :width].nan_to_num(0).to(q.dtype)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.stack(outs)
