"""The rows of a forward pass: where their KV is written, and which KV each of them sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kv_pools import KeyValueLayout, LatentLayout, LayerKv
from .norm import RMSNorm


class Sequences(NamedTuple):
    """The rows of a pass as recurrent layers read them: each request's are in order, after what its slot keeps."""

    slots: Tensor  # [B] int32; -1: rows of no request
    cu_seqlens: Tensor  # [B + 1] int32, offsets of the requests' rows
    prefix_lens: Tensor  # [num_slots] int32; 0: the request begins here, from zeros
    mask: Tensor | None  # [M, W] int64, of trees; None: chains, which are committed at once
    status: Tensor | None  # [num_slots] int32


class LatentBlock(NamedTuple):
    """KV rows that latent attention expands to keys and values of heads, for all requests of a pass at once."""

    rows: Tensor  # [R] int64, in pools: page * page_size + row; R is a multiple of this block's page_size
    page_table: Tensor  # [B, pages] int32: each request's pages of expanded rows
    prefix_lens: Tensor  # [B] int32: of these, the rows that all rows of a request see
    page_size: int
    tail_len: int  # rows after those, a causal chain: the request's own. 0: the block has none


class PagedBatch(NamedTuple):
    """Which KV rows a forward pass writes and sees; letters are those of `tree_attention`.

    Row j of request b is written at KV row `prefix_lens[slot] + row_offset + j` if j < num_valid[b]. It sees the
    prefix and, among the `tail_len` rows after it, those that its mask names (no mask: a causal chain).

    Requests have Q rows each, and positions are [B, Q]. With `cu_seqlens_q` rows are packed instead: positions and
    mask are [M] and [M, W], and a request's tail is its own rows.
    """

    slots: Tensor  # [B] int32
    page_table: Tensor  # [num_slots, max_pages] int32, for layers whose window has no table of its own
    prefix_lens: Tensor  # [num_slots] int32
    tail_len: int | None = None  # None: packed rows
    row_offset: int = 0
    mask: Tensor | None = None  # [B, Q, W] or [M, W] int64
    num_valid: Tensor | None = None  # [B] int32
    cu_seqlens_q: Tensor | None = None  # [B + 1] int32: offsets of the requests' packed rows
    status: Tensor | None = None  # [num_slots] int32
    fixed_split: int | None = None
    max_kv_len: int | None = None  # bounds prefix + tail of every request; None: the page table's capacity
    window_tables: Mapping[int, Tensor] = MappingProxyType({})  # [num_slots, max_pages] by the layers' window
    # For recurrent layers, where requests are cut into pieces with prefixes of their own; None: as `as_sequences` says.
    sequences: Sequences | None = None
    # Together all KV rows of a prefill, where latent attention is to expand them; empty: it does not.
    latent_blocks: Sequence[LatentBlock] = ()

    def with_unused_rows(self, num_nodes: Tensor) -> PagedBatch:
        """Return the batch for recurrent layers to read `num_nodes` [B] of each request's packed rows, the first."""
        assert self.cu_seqlens_q is not None and self.mask is not None
        begins = self.cu_seqlens_q[:-1]
        slots, bounds = with_gaps(self.slots, begins, begins + num_nodes, len(self.mask))
        return self._replace(sequences=Sequences(slots, bounds, self.prefix_lens, self.mask, self.status))

    def as_sequences(self, positions: Tensor) -> Sequences:
        """Return the rows, at positions [B, Q] or [M], as recurrent layers read them."""
        if self.sequences is not None:
            return self.sequences
        assert self.row_offset == 0  # a slot keeps the state before its tail alone
        if self.cu_seqlens_q is not None:
            return Sequences(self.slots, self.cu_seqlens_q, self.prefix_lens, self.mask, self.status)
        batch, count = positions.shape
        starts = torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=positions.device)
        mask = None if self.mask is None else self.mask.flatten(0, 1)
        if self.num_valid is None:
            return Sequences(self.slots, starts, self.prefix_lens, mask, self.status)
        slots, bounds = with_gaps(self.slots, starts[:-1], starts[:-1] + self.num_valid, batch * count)
        return Sequences(slots, bounds, self.prefix_lens, mask, self.status)

    def table_of(self, kv: LayerKv) -> Tensor:
        """Return the page table of a layer."""
        return self.page_table if kv.window is None else self.window_tables[kv.window]

    def write(self, kv: LayerKv, *rows: Tensor) -> None:
        """Write rows [B, Q, heads, dim] or [M, heads, dim], one tensor for each pool, to a layer's pools."""
        kv.layout.write(kv, rows, **self._write_arguments(kv))

    def rope_and_write(
        self,
        qkv: Tensor,
        rotations: Tensor,
        positions: Tensor,
        kv: LayerKv,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Tensor:
        """Normalize and rotate queries and keys, write keys and values to a layer's pools, and return the queries.

        Args:
            qkv: [B, Q, heads + 2 * kv_heads, head_dim] or [M, ...].
            rotations: [num_positions, head_dim] float32, cosines and sines.
            positions: [B, Q] or [M], indices into `rotations`.
            kv: the layer's pools.
            q_norm: applied to each query head before the rotation.
            k_norm: applied to each key head before the rotation.

        Returns:
            [B, Q, heads, head_dim] or [M, heads, head_dim].
        """
        assert isinstance(kv.layout, KeyValueLayout)
        return kv.layout.rope_and_write(
            qkv,
            rotations,
            positions,
            kv,
            **self._write_arguments(kv),
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=1e-6 if q_norm is None else q_norm.eps,
        )

    def write_latent(
        self,
        rows: Tensor,
        norm: RMSNorm,
        rotations: Tensor | None,
        positions: Tensor,
        kv: LayerKv,
        *,
        interleaved: bool,
        q: Tensor | None = None,
        q_norm: Tensor | None = None,
    ) -> Tensor | None:
        """Normalize and rotate latent rows, write them to a layer's pools, and normalize what queries are made of.

        Args:
            rows: [T, latent + rope].
            norm: of the latent part.
            rotations: [num_positions, rope] float32, cosines and sines; None: nothing is rotated.
            positions: [B, Q] or [M], indices into `rotations`.
            kv: the layer's pools.
            interleaved: whether rotated pairs are neighbors.
            q: [T, C] to normalize with the eps of `norm`, or None.
            q_norm: [C], the weight of q's norm.

        Returns:
            Normalized q; None without q.
        """
        assert isinstance(kv.layout, LatentLayout)
        out = None if q is None else q.new_empty(q.shape)
        shape = positions.shape
        kv.layout.normalize_and_write(
            rows.view(*shape, -1),
            norm.weight,
            kv,
            eps=norm.eps,
            cos_sin=rotations,
            positions=None if rotations is None else positions,
            interleaved=interleaved,
            q=None if q is None else q.view(*shape, -1),
            q_norm=q_norm,
            q_out=None if out is None else out.view(*shape, -1),
            **self._write_arguments(kv),
        )
        return out

    def _write_arguments(self, kv: LayerKv) -> dict[str, Any]:
        """Return the arguments that all ops which write KV share."""
        return {
            "page_table": self.table_of(kv),
            "prefix_lens": self.prefix_lens,
            "row_offset": self.row_offset,
            "slots": self.slots,
            "num_valid": self.num_valid,
            "cu_seqlens_q": self.cu_seqlens_q,
            "status": self.status,
        }

    def attend(
        self,
        q: Tensor,
        kv: LayerKv,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention output of queries over a layer's KV: of q's shape, with rows as wide as values.

        Args:
            q: [B, Q, heads, head_dim] or [M, heads, head_dim].
            kv: the layer's pools.
            scale: of the scores; None: head_dim ** -0.5.
            window: rows of the sliding window; None: all rows are visible.
            soft_cap: c in c * tanh(score / c); None: no cap.
            sinks: [heads] float32, one more score for each head, which adds to the softmax's sum and to nothing else.
        """
        lse = None if sinks is None else q.new_empty(q.shape[:-1], dtype=torch.float32)
        out = kv.layout.attend(
            q,
            kv,
            page_table=self.table_of(kv),
            prefix_lens=self.prefix_lens,
            slots=self.slots,
            q_lens=self.num_valid,
            cu_seqlens_q=self.cu_seqlens_q,
            tail_len=self.tail_len,
            mask=self.mask,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            fixed_split=self.fixed_split,
            max_kv_len=self.max_kv_len,
            lse=lse,
            status=self.status,
        )
        if lse is not None and sinks is not None:
            # exp(lse) becomes exp(lse) + exp(sink).
            out = (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
        return out


def with_gaps(slots: Tensor, begins: Tensor, ends: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return slots [2 * B] and offsets [2 * B + 1] of requests with rows [begin, end) and of the rows between them.

    The first request begins at row 0. Rows after a request up to the next are a request of slot -1.
    """
    bounds = torch.stack([begins, ends], 1).flatten()
    last = torch.full_like(bounds[:1], num_rows)
    return torch.stack([slots, torch.full_like(slots, -1)], 1).flatten(), torch.cat([bounds, last])


class LastRows(NamedTuple):
    """The rows of a pass whose hidden states are wanted, each as a request of one row."""

    indices: Tensor  # [R] int32, among the pass's T rows
    positions: Tensor  # [R, 1] int32
    batch: PagedBatch
