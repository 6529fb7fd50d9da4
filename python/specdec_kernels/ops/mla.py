"""Multi-head latent attention: tree attention over paged latent rows, its workspace size and its kernel plan."""

from __future__ import annotations

from .. import _C
from ._alloc import empty, empty_like, refuse_gradient, shape_of
from ._tensor import Tensor


def mla_tree_attention(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    latent_dim: int = 512,
    slots: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    tail_len: int | None = None,
    mask: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float,
    window: int | None = None,
    kv_scale: float = 1.0,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    plan: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Compute multi-head latent attention of query rows over paged latent rows: a prefix, then a tail seen by mask.

    This is the absorbed form: a query is q_nope @ W_UK of its head (latent_dim elements) and then its rotated part, a
    latent row is the compressed KV and then the rotated key that all heads share. The whole row is the key, its first
    latent_dim elements are the value, and the caller multiplies each head's output by W_UV. All heads read the same
    rows, once.

    Prefix, tail, mask, window, lengths, empty rows, status and equal bits are as in `tree_attention`.

    With `indices` each query row attends to the KV rows of its own list instead: prefix rows that an indexer chose, and
    its ancestors in the tail. The result is that of a mask of the same rows.

    Args:
        q: [B, Q, Hq, latent_dim + rope_dim] padded, or [T, Hq, latent_dim + rope_dim] packed with cu_seqlens_q;
            float32, float16 or bfloat16. The width is a multiple of 16, at most 576; rope_dim may be 0. Only the last
            dimension must be contiguous. Tensor cores need 16-bit floats, and rows of q, out and the pool that are
            aligned to 16 bytes.
        kv_pool: [P, page_size, latent_dim + rope_dim] of q's dtype or float8_e4m3fn; or uint8 [P, page_size, 656], the
            published rows of 512 float8_e4m3fn, 4 float32 factors (one for each 128 of them) and 64 bfloat16. Only the
            last dimension must be contiguous.
        page_table: [num_slots, max_pages] int32.
        prefix_lens: [num_slots] int32.
        latent_dim: elements of the value, a multiple of 16 up to 512; 512 for rows of 656 bytes.
        slots: [B] int32.
        q_lens: [B] int32, valid query rows of each request (padded q only). None: Q.
        cu_seqlens_q: [B + 1] int32, starting at 0.
        tail_len: rows of the tail. None: each request's number of valid query rows.
        mask: [B, Q, W] or packed [T, W] int64 as 64-bit patterns, bit j of word w: tail row 64 w + j is visible. None
            is a causal chain.
        indices: [B, Q, K] or packed [T, K] int32, positions in the request from 0 to prefix + tail - 1; -1: none. A
            position that is listed twice counts twice. Not with mask or window.
        scale: factor of the scores, above 0: that of the unabsorbed heads, 1 / sqrt(nope_dim + rope_dim) and YaRN's.
        window: sliding window, at least 1. None: all.
        kv_scale: factor of float8_e4m3fn rows; 1 for other pools.
        fixed_split: for batch invariance, split long KV at multiples of this many rows (a multiple of 128).
        max_kv_len: bound on the KV rows of a request, prefix and tail. None: what the page table can hold.
        plan: name of a plan to force, as returned by `mla_tree_attention_plan`. Must be None on the CPU.
        out: [.., Hq, latent_dim] of q's dtype; only the last dimension must be contiguous.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        workspace: scratch of at least mla_tree_attention_workspace(...) bytes, aligned to 16 bytes. None allocates it.
        status: [num_slots] int32. STALLED is read. Gains BAD_PAGE and BAD_LENGTH as in `tree_attention`; an entry of
            indices out of range sets BAD_LENGTH and is skipped. Without status, it is a ValueError on the CPU.
        stream: CUDA stream; None: the current one.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens with cu_seqlens_q; indices with
            mask or window; latent_dim, window, a scale, fixed_split or max_kv_len out of range; kv_scale for a pool
            that is not float8_e4m3fn; a plan that does not exist or cannot run this call on this device; a workspace
            too small; q or kv_pool requires grad where gradients are recorded; on the CPU, a length or an entry of
            indices out of range without status.

    Source: multi-head latent attention and its absorbed form, DeepSeek-V2 (arXiv 2405.04434); the row of 656 bytes,
    DeepSeek-V3.2's FlashMLA.
    """
    refuse_gradient("mla_tree_attention", q=q, kv_pool=kv_pool)
    if out is None:
        shape = shape_of("mla_tree_attention", "q", q, 4 if cu_seqlens_q is None else 3)
        out = empty("mla_tree_attention", q, (*shape[:-1], latent_dim), str(q.dtype).rsplit(".", 1)[-1])
    if workspace is None:
        size = _C.mla_tree_attention_workspace(
            q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len, plan
        )
        workspace = empty("mla_tree_attention", q, (size,), "uint8") if size else None
    _C.mla_tree_attention(
        stream, q, kv_pool, page_table, prefix_lens, latent_dim, slots, q_lens, cu_seqlens_q, tail_len, mask, indices,
        scale, window, kv_scale, fixed_split, max_kv_len, plan, out, lse, workspace, status,
    )  # fmt: skip
    return out


def mla_tree_attention_workspace(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    *,
    latent_dim: int = 512,
    cu_seqlens_q: Tensor | None = None,
    indices: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    plan: str | None = None,
) -> int:
    """Return the bytes of workspace that `mla_tree_attention` needs for tensors of these shapes, whatever the lengths.

    Args:
        q: as for `mla_tree_attention`, and so are the others; no element is read.
        kv_pool: its dtype and page size matter.
        page_table: its width bounds KV.
        latent_dim: elements of the value.
        cu_seqlens_q: given if q is packed.
        indices: given if query rows have index lists.
        fixed_split: rows between splits.
        max_kv_len: bound on KV.
        plan: name of a plan to force.

    Returns:
        The number of bytes, 0 on the CPU.

    Raises:
        ValueError: wrong dtype, shape, device or stride; latent_dim, fixed_split, max_kv_len or plan as for
            `mla_tree_attention`.
    """
    size: int = _C.mla_tree_attention_workspace(
        q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len, plan
    )
    return size


def mla_tree_attention_plan(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    *,
    latent_dim: int = 512,
    cu_seqlens_q: Tensor | None = None,
    indices: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    plan: str | None = None,
) -> str:
    """Return the plan that `mla_tree_attention` runs for tensors of these shapes, with all rows aligned to 16 bytes.

    `specdec_kernels.mla_plan` computes the same without tensors or a GPU.

    Args:
        q: as for `mla_tree_attention`, and so are the others; no element is read.
        kv_pool: its dtype and page size matter.
        page_table: its width bounds KV.
        latent_dim: elements of the value.
        cu_seqlens_q: given if q is packed.
        indices: given if query rows have index lists.
        fixed_split: rows between splits.
        max_kv_len: bound on KV.
        plan: name of a plan to force.

    Returns:
        The plan's name, such as "sm80.mma.64.splits8"; "cpu" on the CPU.

    Raises:
        ValueError: as for `mla_tree_attention_workspace`.
    """
    name: str = _C.mla_tree_attention_plan(
        q, kv_pool, page_table, latent_dim, cu_seqlens_q, indices, fixed_split, max_kv_len, plan
    )
    return name


def write_latent(
    x: Tensor,
    norm: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    eps: float = 1e-6,
    cos_sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_refs: Tensor | None = None,
    kv_scale: float = 1.0,
    q: Tensor | None = None,
    q_norm: Tensor | None = None,
    q_out: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Normalize the latent part of each row, rotate the rest, and write the row to its page.

    Fuses everything between a layer's first projection and its latent cache. Rows are written as by `write_kv`. With
    `q`, what queries are made of is normalized in the same launch. On a GPU the op reads `norm` and `q_norm` before the
    previous kernel on the stream has finished: that kernel must not write them.

    Args:
        x: [B, Q, latent_dim + rope_dim], or packed [T, latent_dim + rope_dim] with cu_seqlens_q; float32, float16 or
            bfloat16; only the last dimension must be contiguous, here and in q.
        norm: [latent_dim] of x's dtype, weight of the RMSNorm; latent_dim is at most 4096.
        kv_pool: [num_pages, page_size, latent_dim + rope_dim] of x's dtype or float8_e4m3fn; only the last dimension
            must be contiguous; changed in place.
        page_table: [num_slots, max_pages] int32.
        prefix_lens: [num_slots] int32.
        eps: of both norms, above 0.
        cos_sin: [num_positions, rope_dim] float32: per position rope_dim / 2 cosines, then as many sines. None: the
            part is written as it is.
        positions: [B, Q] or packed [T] int32, with cos_sin; clamped to the table.
        interleaved: whether elements 2 i and 2 i + 1 of x are rotated together; else i and i + rope_dim / 2. In the
            cache pairs are half a part apart in either case.
        row_offset: added to prefix_lens.
        slots: [B] int32.
        num_valid: [B] int32, rows of each request to write. None: all.
        cu_seqlens_q: [B + 1] int32: request b has packed rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        kv_scale: as k_scale of `write_kv`.
        q: [B, Q, C] or [T, C] like x, C at most 4096. None: only rows are written.
        q_norm: [C] of x's dtype, with q.
        q_out: as q, contiguous, written with its normalized rows; with q.
        status: [num_slots] int32, with the bits of `write_kv`.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride; cos_sin without positions, q without q_norm or q_out, or the
            other way round; a scale that `write_kv` refuses.
    """
    _C.write_latent(
        stream, x, norm, eps, kv_pool, page_table, prefix_lens, cos_sin, positions, interleaved, row_offset, slots,
        num_valid, cu_seqlens_q, page_refs, kv_scale, q, q_norm, q_out, status,
    )  # fmt: skip


def rope_heads(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Rotate the rotated part of query heads, as `write_latent` rotates that of a row.

    Args:
        x: [T, H, rope_dim] float32, float16 or bfloat16; only the last dimension must be contiguous, here and in out.
        cos_sin: [num_positions, rope_dim] float32, as for `write_latent`.
        positions: [T] int32; clamped to the table.
        interleaved: as for `write_latent`.
        out: like x, a part of wider heads for instance; not x itself.
        stream: CUDA stream; None: the current one.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; an odd rope_dim.
    """
    if out is None:
        out = empty_like("rope_heads", x, shape_of("rope_heads", "x", x, 3))
    _C.rope_heads(stream, x, cos_sin, positions, interleaved, out)
    return out
