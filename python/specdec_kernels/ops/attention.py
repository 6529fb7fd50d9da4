"""Attention ops: tree attention over paged KV, its workspace size and its kernel plan."""

from __future__ import annotations

from typing import Literal

from .. import _C
from ._alloc import as_nhd, empty, refuse_gradient, shape_of
from ._tensor import Tensor


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    slots: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    tail_len: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    plan: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Compute attention of query rows over paged KV: a prefix that all rows see, then a tail that they see by mask.

    KV rows [0, prefix_lens[s]) of the request in slot s are visible to each of its query rows, the next `tail_len` rows
    by `mask`. In verification the tree's nodes are queries and tail. In drafting the frontier is the queries, and all
    drafted nodes are the tail. A prefill chunk is a causal chain. Lengths and tables are read on the device, so one
    captured call serves every length up to `max_kv_len`.

    On a GPU the plan (the kernel, and how it divides the work) is chosen from shapes and `max_kv_len`, never from
    lengths. Without `max_kv_len` a request may fill its page table, and the plan is made for at most 4096 KV rows: pass
    it if known.

    These query rows give zeros (lse -inf), never NaN: rows that see nothing, rows at or beyond q_lens[b], rows of empty
    or stalled slots, and rows after the last packed request. KV rows that no query row of a request sees never affect
    its result, whatever they hold. On the CPU and without tensor cores (float32, or rows not aligned to 16 bytes) this
    holds for each query row; on tensor cores a NaN that one query row sees may reach other query rows of its request.

    Equal calls give equal bits. On the CPU and without tensor cores the result of a row depends only on its own
    request. On tensor cores KV is split by the size of the whole batch. With `fixed_split` it is split at fixed rows,
    and then the bits of a row depend neither on other requests nor on the number of query rows.

    Args:
        q: [B, Q, Hq, D] padded, or [T, Hq, D] packed with cu_seqlens_q; float32, float16 or bfloat16, D 64, 128 or 256.
            Only the last dimension must be contiguous (a transposed view is fine). Tensor cores need 16-bit floats, and
            rows of q, out and the pools that are aligned to 16 bytes.
        k_pool: [P, page_size, Hkv, D] of q's dtype or float8_e4m3fn; only the last dimension must be contiguous. Hkv
            divides Hq. See layout.
        v_pool: like k_pool.
        page_table: [num_slots, max_pages] int32. Entries after a request's length, or wholly before the window of all
            its query rows, are never used.
        prefix_lens: [num_slots] int32.
        slots: [B] int32.
        q_lens: [B] int32, valid query rows of each request (padded q only). None: Q.
        cu_seqlens_q: [B + 1] int32, starting at 0: rows of request b are cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        tail_len: rows of the tail. None: each request's number of valid query rows.
        mask: [B, Q, W] or packed [T, W] int64 as 64-bit patterns, bit j of word w: tail row 64 w + j is visible. None
            is a causal chain: query row i sees tail rows j <= i + tail_len - (rows of the request, Q if padded).
        scale: factor of the scores, above 0. None: 1 / sqrt(D).
        window: sliding window, at least 1: a query row sees the last `window` rows of its path, which is the prefix and
            then its visible tail rows, its own included. None: all.
        soft_cap: scaled scores become soft_cap * tanh(score / soft_cap). None: they stay.
        k_scale: factor of float8_e4m3fn keys; 1 for other pools.
        v_scale: the same for values.
        fixed_split: for batch invariance, split long KV at multiples of this many rows (a multiple of 128) instead of
            evenly over the batch. Slower if few splits leave SMs idle. The workspace grows with max_kv_len /
            fixed_split; 1024 to 4096 is reasonable. No effect on the CPU.
        max_kv_len: bound on the KV rows of a request, prefix and tail, at least 1. None: what the page table can hold.
            A longer request is clamped, as it is to the table, and sets BAD_LENGTH.
        layout: "HND" for pools [P, Hkv, page_size, D]. Shapes do not distinguish the layouts: pools of the other
            one give other results wherever Hq is a multiple of the page size.
        plan: name of a plan to force, as returned by `tree_attention_plan`, for tests and benchmarks. Parts of the name
            after "<machine>.<kernel>.<tile rows>" may be omitted. Must be None on the CPU.
        out: as q; only the last dimension must be contiguous.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        workspace: scratch of at least tree_attention_workspace(...) bytes: a contiguous tensor of any dtype, aligned to
            16 bytes. None allocates it (the CPU needs none). Concurrent calls need one each.
        status: [num_slots] int32. STALLED is read. Gains BAD_PAGE if a needed table entry is no page (its rows are
            invisible), BAD_LENGTH if a length was out of range and clamped. Without status, such a length is a
            ValueError on the CPU, and clamped in silence on a GPU, whose lengths the host does not read.
        stream: CUDA stream; None: the current one.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens with cu_seqlens_q; window,
            soft_cap, a scale, fixed_split or max_kv_len out of range; k_scale or v_scale for pools that are not
            float8_e4m3fn; an unknown layout; a plan that does not exist or cannot run this call on this device; a
            workspace too small; q, k_pool or v_pool requires grad where gradients are recorded: the op has no backward;
            on the CPU, a length out of range without status.

    Source: online softmax in tiles, FlashAttention (Dao et al., arXiv 2205.14135) and FlashAttention-2 (2307.08691);
    Hopper's tensor cores, FlashAttention-3 (Shah et al., 2407.08608); split KV, Flash-Decoding (Dao et al., 2023); tree
    attention, SpecInfer (Miao et al., 2305.09781).
    """
    refuse_gradient("tree_attention", q=q, k_pool=k_pool, v_pool=v_pool)
    k_pool, v_pool = as_nhd("tree_attention", layout, k_pool, v_pool)
    if out is None:
        shape = shape_of("tree_attention", "q", q, 4 if cu_seqlens_q is None else 3)
        out = empty("tree_attention", q, shape, str(q.dtype).rsplit(".", 1)[-1])
    if workspace is None:
        size = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
        workspace = empty("tree_attention", q, (size,), "uint8") if size else None
    _C.tree_attention(
        stream, q, k_pool, v_pool, page_table, prefix_lens, slots, q_lens, cu_seqlens_q, tail_len, mask, scale, window,
        soft_cap, k_scale, v_scale, fixed_split, max_kv_len, plan, out, lse, workspace, status,
    )  # fmt: skip
    return out


def tree_attention_workspace(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    plan: str | None = None,
) -> int:
    """Return the bytes of workspace that `tree_attention` needs for tensors of these shapes, whatever the lengths.

    Without fixed_split the size depends on the GPU and the number of query rows, and is bounded (about 20 MB on an
    H200). Calls that do not run concurrently can share one workspace of the largest size.

    Args:
        q: as for `tree_attention`, and so are the others; no element is read.
        k_pool: its dtype and page size matter.
        page_table: its width bounds KV.
        cu_seqlens_q: given if q is packed.
        fixed_split: rows between splits.
        max_kv_len: bound on KV.
        layout: of k_pool.
        plan: name of a plan to force.

    Returns:
        The number of bytes, 0 on the CPU.

    Raises:
        ValueError: wrong dtype, shape, device or stride; fixed_split is not a positive multiple of 128; max_kv_len or
            plan as for `tree_attention`.
    """
    (k_pool,) = as_nhd("tree_attention_workspace", layout, k_pool)
    size: int = _C.tree_attention_workspace(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
    return size


def tree_attention_plan(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    fixed_split: int | None = None,
    max_kv_len: int | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    plan: str | None = None,
) -> str:
    """Return the plan that `tree_attention` runs for tensors of these shapes, with all rows aligned to 16 bytes.

    `specdec_kernels.attention_plan` computes the same without tensors or a GPU.

    Args:
        q: as for `tree_attention`, and so are the others; no element is read.
        k_pool: its dtype and page size matter.
        page_table: its width bounds KV.
        cu_seqlens_q: given if q is packed.
        fixed_split: rows between splits.
        max_kv_len: bound on KV.
        layout: of k_pool.
        plan: name of a plan to force.

    Returns:
        The plan's name, such as "sm90.cluster.16.blocks8.sharing1"; "cpu" on the CPU.

    Raises:
        ValueError: as for `tree_attention_workspace`.
    """
    (k_pool,) = as_nhd("tree_attention_plan", layout, k_pool)
    name: str = _C.tree_attention_plan(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
    return name
