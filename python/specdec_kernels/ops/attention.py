"""Attention ops: tree attention over paged KV, its workspace size and its kernel plan."""

from __future__ import annotations

from .. import _C
from ._alloc import empty, shape_of
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
    plan: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Attention of each request's query rows over its paged KV: a prefix all rows see, then a tail seen by mask.

    The KV of the request in slot s: rows [0, prefix_lens[s]) are visible to every query row, the `tail_len` rows behind
    them by `mask`. Verification has the tree nodes as queries and tail; draft decoding has the frontier as queries and
    all drafted nodes as tail; a prefill chunk is a causal chain. Lengths and tables are read on the device, so one
    captured call serves every length up to `max_kv_len`.

    On a GPU the kernel and how it divides the work, the plan, are chosen from shapes and `max_kv_len`, never from
    lengths. Without `max_kv_len` a request may have as much KV as the page table has room for, and the plan is made for
    4096 rows of it at most: pass what you know.

    A query row with nothing to see, one at or beyond q_lens[b], of an empty or stalled slot, or behind the last packed
    request gives zeros (lse -inf), never NaN. KV rows that no query row of the request sees never touch a result,
    whatever they hold. On the CPU, and where no tensor cores are used (float32, rows off 16 bytes), that holds row by
    row; on tensor cores a NaN in a row seen by one query row may reach others of its request.

    Equal calls give equal bits. On the CPU and without tensor cores a row's result depends on its own request alone. On
    tensor cores KV is cut into parts by the size of the whole batch; with `fixed_split` at fixed rows instead, and then
    too a row's bits depend on neither the other requests nor the number of query rows beside it.

    Args:
        q: [B, Q, Hq, D] padded, or [T, Hq, D] packed with cu_seqlens_q; float32, float16 or bfloat16, D 64, 128 or 256;
            any strides but a contiguous last dimension (a transposed view is fine). Tensor cores need 16-bit floats and
            rows of q, out and the pools that start on 16 bytes.
        k_pool, v_pool: [P, page_size, Hkv, D] of q's dtype or float8_e4m3fn, any strides but the last; Hkv divides Hq.
        page_table: [num_slots, max_pages] int32; entries behind a request's length, or wholly before the window of all
            its query rows, are never used.
        prefix_lens: [num_slots] int32.
        slots: [B] int32.
        q_lens: [B] int32, valid query rows of each request (padded q only); None means Q.
        cu_seqlens_q: [B + 1] int32, request b's rows are cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; starts at 0.
        tail_len: rows of the tail; None means each request's number of valid query rows.
        mask: [B, Q, W] or packed [T, W] int64 as 64-bit patterns, bit j of word w: tail row 64 w + j is visible. None
            is a causal chain: query row i sees tail rows j <= i + tail_len - (rows of the request, Q when padded).
        scale: factor of the scores, above 0; 1 / sqrt(D) by default.
        window: sliding window, 1 or more: of its path, the prefix and then the tail rows visible to it (its own among
            them), a query row sees the last `window` rows. None means all.
        soft_cap: scores, scaled, become soft_cap * tanh(score / soft_cap). None means they stay as they are.
        k_scale, v_scale: what a number 1.0 in float8_e4m3fn pools stands for; 1 for other pools.
        fixed_split: batch invariance: long KV is cut at multiples of this many rows, a multiple of 128, instead of into
            even parts of the whole batch's KV; slower where few cuts leave SMs idle. The workspace grows
            with max_kv_len over fixed_split; 1024 to 4096 is reasonable. No effect on the CPU.
        max_kv_len: KV rows, prefix and tail together, that no request exceeds, 1 or more; by default, and at most, what
            the page table has room for. A longer request is clamped to it on either device, as it is to the table, and
            reported as a bad length.
        plan: forces a plan by its name, as `tree_attention_plan` returns it, for tests and benchmarks; parts of a name
            behind "<machine>.<kernel>.<tile rows>" may be left out and follow the rules. None on the CPU.
        out: as q, any strides but the last; written.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        workspace: a contiguous tensor of any dtype with tree_attention_workspace(...) bytes or more, on 16 bytes;
            contents of no meaning before and after. Allocated when None. Calls that may run at the same time need one
            each. None is needed on the CPU.
        status: [num_slots] int32. STALLED is read. Bits are added: bad page where a needed table entry is no page (its
            rows are invisible), bad length where a length was out of range and clamped.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens beside cu_seqlens_q; window,
            soft_cap, a scale, fixed_split or max_kv_len out of range; k_scale or v_scale for pools that are not
            float8_e4m3fn; a plan that does not exist or cannot run such a call on this device; a workspace too small.

    Source: Dao et al., FlashAttention (arXiv 2205.14135) and FlashAttention-2 (2307.08691), online softmax in tiles;
    Shah et al., FlashAttention-3 (2407.08608), on Hopper's tensor cores; Dao et al., Flash-Decoding (2023), KV cut into
    parts that are merged by their sums of exponentials; Miao et al., SpecInfer (2305.09781), tree attention.
    """
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
    plan: str | None = None,
) -> int:
    """How many bytes of workspace `tree_attention` needs for tensors of these shapes, whatever the lengths.

    It is 0 on the CPU. Without fixed_split it depends on the GPU and on the number of query rows, but is bounded (some
    20 MB on an H200); an engine makes one workspace of the most that any of its calls needs.

    Args:
        q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan: as for `tree_attention`; no element is read.

    Returns:
        The number of bytes.

    Raises:
        ValueError: wrong dtype, shape, device or stride; fixed_split is not a positive multiple of 128; max_kv_len or
            plan as for `tree_attention`.
    """
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
    plan: str | None = None,
) -> str:
    """Which plan `tree_attention` runs for tensors of these shapes, where rows of all of them start on 16 bytes.

    `specdec_kernels.attention_plan` gives the same without tensors or a GPU.

    Args:
        q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan: as for `tree_attention`; no element is read.

    Returns:
        Its name, as "sm90.cluster.16.blocks8.sharing1"; "cpu" on the CPU.

    Raises:
        ValueError: as `tree_attention_workspace`.
    """
    name: str = _C.tree_attention_plan(q, k_pool, page_table, cu_seqlens_q, fixed_split, max_kv_len, plan)
    return name
