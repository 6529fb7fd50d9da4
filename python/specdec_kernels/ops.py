"""The ops. One thin function each: allocate the outputs that were not passed, call the compiled op positionally.

Conventions: shapes are row-major and contiguous unless said; indices are int32; every op runs on the device of its
tensors (all the same), on the caller's current stream unless `stream=` names another, without synchronising, and is
legal inside a CUDA graph when its outputs are passed. Nothing is converted or copied for the caller: a wrong dtype,
shape, device or stride is a ValueError that names the argument. `requires_grad` is ignored.

Letters: B batch, N tree nodes, S accept row width, k topk, V vocabulary, W mask words (ceil(N / 64)).
`slots[B]` names the slot each row works for (-1: an empty row); None means row b is slot b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from . import _C
from ._alloc import empty, shape_of

if TYPE_CHECKING:
    Tensor: TypeAlias = Any  # anything that speaks DLPack


# --- draft ------------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor,
    k: int,
    *,
    id_map: Tensor | None = None,
    out_ids: Tensor | None = None,
    out_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-softmax and the k best of every row, in one pass over the logits.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf.
        k: how many, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        out_ids [R, k] int32, best first, and out_logprobs [R, k] float32, never above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range.
    """
    rows, _ = shape_of("select_topk", "logits", logits, 2)
    if out_ids is None:
        out_ids = empty("select_topk", logits, (rows, k), "int32")
    if out_logprobs is None:
        out_logprobs = empty("select_topk", logits, (rows, k), "float32")
    _C.select_topk(stream, logits, id_map, out_ids, out_logprobs)
    return out_ids, out_logprobs


# --- tree -------------------------------------------------------------------------------------------------------------


# --- attention --------------------------------------------------------------------------------------------------------


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
    out: Tensor | None = None,
    lse: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Attention of each request's query rows over its paged KV: a prefix all rows see, then a tail seen by mask.

    The KV of the request in slot s: rows [0, prefix_lens[s]) are visible to every query row, the `tail_len` rows behind
    them by `mask`. Verification has the tree nodes as queries and tail; draft decoding has the frontier as queries and
    all drafted nodes as tail; a prefill chunk is a causal chain. Lengths and tables are read on the device.

    A query row with nothing to see, one at or beyond q_lens[b], of an empty slot, or behind the last packed request
    gives zeros (lse -inf), never NaN. KV rows that a query row does not see never touch its result, whatever they hold.
    A row's result depends on its own request alone, bit for bit.

    Args:
        q: [B, Q, Hq, D] padded, or [T, Hq, D] packed with cu_seqlens_q; float32, float16 or bfloat16, D 64, 128 or 256;
            any strides but a contiguous last dimension (a transposed view is fine).
        k_pool, v_pool: [P, page_size, Hkv, D] of q's dtype, any strides but the last; Hkv divides Hq.
        page_table: [num_slots, max_pages] int32; entries behind a request's length are never used.
        prefix_lens: [num_slots] int32.
        slots: [B] int32.
        q_lens: [B] int32, valid query rows of each request (padded q only); None means Q.
        cu_seqlens_q: [B + 1] int32, request b's rows are cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; starts at 0.
        tail_len: rows of the tail; None means each request's number of valid query rows.
        mask: [B, Q, W] or packed [T, W] int64 as 64-bit patterns, bit j of word w: tail row 64 w + j is visible. None
            is a causal chain: query row i sees tail rows j <= i + tail_len - (rows of the request, Q when padded).
        scale: factor of the scores, 1 / sqrt(D) by default.
        out: as q, any strides but the last; written.
        lse: [B, Q, Hq] or packed [T, Hq] float32, written with the natural log of the sum of exponentials.
        status: [num_slots] int32, bits are added: bad page where a needed table entry is no page (its rows are
            invisible), bad length where a length was out of range and clamped.

    Returns:
        out.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too few mask words; q_lens beside cu_seqlens_q.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), online softmax; Miao et al., SpecInfer (arXiv 2305.09781),
    tree attention.
    """
    if out is None:
        shape = shape_of("tree_attention", "q", q, 4 if cu_seqlens_q is None else 3)
        out = empty("tree_attention", q, shape, str(q.dtype).rsplit(".", 1)[-1])
    _C.tree_attention(
        stream, q, k_pool, v_pool, page_table, prefix_lens, slots, q_lens, cu_seqlens_q, tail_len, mask, scale, out,
        lse, status,
    )  # fmt: skip
    return out


# --- verify -----------------------------------------------------------------------------------------------------------


# --- kv ---------------------------------------------------------------------------------------------------------------
