"""Layer ops: RMSNorm + residual, SwiGLU, small-M GEMM, MoE, FP8 and INT4 quantization, RoPE with KV write."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .. import _C
from ._alloc import as_nhd, empty, empty_like, fill_zeros, shape_of, wrong_type
from ._tensor import Tensor


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    topk_weights: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    out_scales: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm, `x / rms(x) * weight`; with `residual`, to x + residual.

    Arithmetic is float32. With a residual, the sum is first rounded to x's dtype, as it is stored. On a GPU the op
    reads `weight` before the previous kernel on the stream has finished: that kernel must not write it.

    Source: Zhang and Sennrich, arXiv 1910.07467.

    Args:
        x: [T, H] float32, float16 or bfloat16; rows may be strided, here and below.
        weight: [H] of the same dtype.
        eps: added to the mean square, above 0.
        residual: [T, H] like x, added to it.
        topk_weights: [T, top_k] float32, only with a residual. x is then [T * top_k, H], expert outputs, which are
            combined first, with the same bits as by `moe_combine`.
        out: preallocated results, None for each one to allocate. The second may be x or residual, and is None without a
            residual.
        out_scales: [G, T] float32, written: out is then float8_e4m3fn, equal to `quantize_fp8` of the result, with one
            scale per row (G is 1) or per 128 elements. On a GPU rows must then be aligned to 16 bytes.
        stream: CUDA stream; None: the current one.

    Returns:
        The normalized rows [T, H], and x + residual [T, H]; without a residual, x itself.

    Raises:
        ValueError: wrong dtype, shape, device or stride; out[1] or topk_weights without a residual; out_scales with
            unaligned rows.
    """
    rows, total = out
    shape = shape_of("add_rms_norm", "x", x, 2)
    if topk_weights is not None:
        shape = shape_of("add_rms_norm", "topk_weights", topk_weights, 2)[0], shape[1]
    if rows is None:
        quantized = out_scales is not None
        rows = empty("add_rms_norm", x, shape, "float8_e4m3fn") if quantized else empty_like("add_rms_norm", x, shape)
    if residual is not None and total is None:
        total = empty_like("add_rms_norm", x, shape)
    _C.add_rms_norm(stream, x, weight, eps, topk_weights, residual, total, out_scales, rows)
    return rows, x if residual is None else total


def rms_norm_concat(
    embeddings: Tensor,
    tokens: Tensor,
    embedding_weight: Tensor,
    features: Tensor,
    feature_weight: Tensor,
    eps: float,
    *,
    feature_rows: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Build the input of an EAGLE-3 layer: RMS-normalized token embeddings and features, concatenated.

    On a GPU the op reads the norm weights before the previous kernel on the stream has finished: that kernel must not
    write them.

    Source: EAGLE-3 (Li et al., arXiv 2503.01840).

    Args:
        embeddings: [V, H] float32, float16 or bfloat16; rows may be strided, here and below.
        tokens: [T] int32. An index outside its table, here and below, is clamped.
        embedding_weight: [H] of the same dtype, the norm weight of embeddings.
        features: [F, H] like embeddings.
        feature_weight: [H] of the same dtype, the norm weight of features.
        eps: of both norms, above 0.
        feature_rows: [T] int32, the feature of each row. None: row i reads feature i, and F is at least T.
        out: preallocated results, None for each one to allocate.
        stream: CUDA stream; None: the current one.

    Returns:
        The concatenated rows [T, 2 * H], embeddings first, and the selected features [T, H], unchanged.

    Raises:
        ValueError: wrong dtype, shape, device or stride; an empty table.
    """
    rows, selected = out
    if rows is None or selected is None:
        (num_rows,) = shape_of("rms_norm_concat", "tokens", tokens, 1)
        _, width = shape_of("rms_norm_concat", "embeddings", embeddings, 2)
        rows = empty_like("rms_norm_concat", embeddings, (num_rows, 2 * width)) if rows is None else rows
        selected = empty_like("rms_norm_concat", embeddings, (num_rows, width)) if selected is None else selected
    _C.rms_norm_concat(
        stream, embeddings, tokens, embedding_weight, features, feature_rows, feature_weight, eps, rows, selected
    )
    return rows, selected


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gates_first: bool = False,
    activation: str = "silu",
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Apply RMSNorm to each group of a row's elements, with a gate, in float32 and rounded once.

    The result is rms_norm(x) * weight * act(gate), as in gated delta nets, or with `gates_first`
    rms_norm(x * act(gate)) * weight, as in Mamba 2.

    Args:
        x: [T, G, D] float32, or of the gate's dtype; only the last dimension must be contiguous.
        gate: [T, G, D] float32, float16 or bfloat16; only the last dimension must be contiguous.
        weight: [D], of all groups, or [G * D], of the gate's dtype.
        eps: added to the mean square of a group, above 0.
        gates_first: gate the input of the norm, not its result.
        activation: of the gate, "silu" or "sigmoid".
        out: preallocated result; only the last dimension must be contiguous. It may be x or gate.
        stream: CUDA stream; None: the current one.

    Returns:
        out [T, G, D], of the gate's dtype.

    Raises:
        ValueError: wrong dtype, shape, device, stride or activation.
    """
    if out is None:
        out = empty_like("gated_rms_norm", gate, shape_of("gated_rms_norm", "gate", gate, 3))
    _C.gated_rms_norm(stream, x, gate, weight, eps, gates_first, activation, out)
    return out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """Compute silu(gate) * up (SwiGLU) in float32, rounded once.

    Args:
        x: [T, 2 * I] float32, float16 or bfloat16: gate, then up; rows may be strided.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        out [T, I].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, width = shape_of("silu_and_mul", "x", x, 2)
        out = empty_like("silu_and_mul", x, (rows, width // 2))
    _C.silu_and_mul(stream, x, out)
    return out


def small_m_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    gated: bool = False,
    plan: str | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Compute `x @ weight.T + bias` for small M (1 to 128 rows), at the memory bandwidth of reading the weight.

    Sums are float32. The bits of a row do not depend on other rows. Above 128 rows cuBLAS is faster: the op reads the
    weight once per 128 rows (Hopper) or 8 rows (other GPUs). On Hopper it reads `weight` before the previous kernel on
    the stream has finished: that kernel must not write it.

    Args:
        x: [M, K] float16 or bfloat16, at most 262144 rows, K a multiple of 64. With x_scales float8_e4m3fn.
        weight: [N, K]; rows of x and weight may be strided, and are aligned to 16 bytes. Gated: [2 * N, K], gate rows,
            then up rows, N a multiple of 8.
        bias: one element per weight row, of x's dtype, with x_scales of out's, or None.
        x_scales: [G, M] float32, the scales of FP8 x as `quantize_fp8` returns them: one group per row or per 128
            elements, each aligned to 16 bytes. FP8 needs a Hopper GPU, K a multiple of 128 and N of 16; out is bfloat16
            unless a float16 out is given.
        weight_scales: [G, N] float32, the same for an FP8 weight. Without x_scales: for an INT4 weight [N, K / 2]
            uint8, interleaved as `int4_place` (csrc/layers/gemm/small_m_gemm.h) describes, with x in 16 bits, K a
            multiple of 256 and N of 16; the four lowest bits of each scale hold the zero point.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        plan: force a kernel, for tests and benchmarks: "sm80.mma", or on Hopper "sm90.wgmma", the default there unless
            rows of `x` or `weight` overlap. FP8 and INT4 weights need "sm90.wgmma".
        out: preallocated result, of x's dtype or, without scales, float32.
        stream: CUDA stream; None: the current one.

    Returns:
        out [M, N].

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many rows; unaligned rows; a plan that does not exist or
            cannot run on the device.
    """
    if out is None:
        rows, _ = shape_of("small_m_gemm", "x", x, 2)
        outs = shape_of("small_m_gemm", "weight", weight, 2)[0]
        shape = rows, outs // 2 if gated else outs
        out = empty_like("small_m_gemm", x, shape) if x_scales is None else empty("small_m_gemm", x, shape, "bfloat16")
    _C.small_m_gemm(stream, x, weight, bias, x_scales, weight_scales, gated, plan, out)
    return out


def small_m_bmm(x: Tensor, weight: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """Compute `x[:, h] @ weight[h]` for every head h (batched GEMM), for few rows.

    Sums are float32. The bits of a row do not depend on other rows. On a GPU the op reads the weights once per 16 rows.
    It does so before the previous kernel on the stream has finished: that kernel must not write them.

    Args:
        x: [M, H, K] float16 or bfloat16, at most 262144 rows and 65535 heads, K a multiple of 32 up to 1024; only the
            last dimension must be contiguous. Each head is aligned to 16 bytes.
        weight: [H, K, N] of the same dtype, N a multiple of 16; K or N is contiguous, so `w.mT` may be passed for w
            [H, N, K]. Each contiguous row is aligned to 16 bytes.
        out: preallocated result, a part of wider heads for instance; only the last dimension must be contiguous.
        stream: CUDA stream; None: the current one.

    Returns:
        out [M, H, N].

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many rows or heads; unaligned rows.
    """
    if out is None:
        rows, heads, _ = shape_of("small_m_bmm", "x", x, 3)
        out = empty_like("small_m_bmm", x, (rows, heads, shape_of("small_m_bmm", "weight", weight, 3)[2]))
    _C.small_m_bmm(stream, x, weight, out)
    return out


def moe_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    sorted_pairs: Tensor,
    expert_ends: Tensor,
    *,
    weight_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    gated: bool = False,
    routing_ready: bool = False,
    shared_weight: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Multiply rows by the weights of their experts (grouped GEMM), for few rows.

    Sums are float32. A selected expert's weight is read once per 32 of its rows (16 if weights have scales, 8 if there
    are no more rows); other experts are not read. The bits of a row do not depend on other rows.

    With `shared_weight`, S shared experts have the ids E to E + S - 1. They are equal parts of one MLP: each has a
    range of its inner elements, and their outputs sum to the MLP's. The op reads the weight as the MLP stores it.

    Args:
        x: [T, K] float16 or bfloat16; with x_scales float8_e4m3fn, as `quantize_fp8` returns it. K is a multiple of 64,
            or of 128 if weights have scales; rows may be strided, and are aligned to 16 bytes.
        weight: [E, N, K] like x, or float8_e4m3fn with scales, at most 1024 experts, N a multiple of 16. Gated: [E, 2 *
            N, K], per expert gate rows, then up rows, N a multiple of 8.
        sorted_pairs: [M] int64, (row, expert) pairs sorted by expert; M is a multiple of T, at most 262144, and pair i
            belongs to row i * T / M. Indices out of range are clamped.
        expert_ends: [E] int32, or [E + S], where each expert's range in `sorted_pairs` ends and the next one's begins.
        weight_scales: [E, G, N] float32, or 2 * N if gated: one group per row or per 128 elements.
        x_scales: [G, T] float32, with as many groups.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        routing_ready: assert that an earlier call on the stream has read these `sorted_pairs` and `expert_ends`, as the
            gate-up call does before the down call. On Hopper the op then reads both, and the weights, before the
            previous kernel on the stream has finished: that kernel must not write any of them.
        shared_weight: the weight of S shared experts, like x, if there are no scales. Gated, it has their outputs:
            [2 * S * N, K], gate rows of all, then up rows. Else it has their inputs: [N, S * K], K for each. Rows may
            be strided, and are aligned to 16 bytes; E + S is at most 1024.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        out [M, N], one row per pair, in x's dtype; with x_scales bfloat16, unless a float16 out is given. Rows of pairs
        that are missing from `sorted_pairs`, or not within any expert's range, are not written; without an `out` they
        are zeros.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many experts or pairs; unaligned rows.
    """
    if out is None:
        outs = shape_of("moe_grouped_gemm", "weight", weight, 3)[1]
        shape = shape_of("moe_grouped_gemm", "sorted_pairs", sorted_pairs, 1)[0], outs // 2 if gated else outs
        out = (
            empty_like("moe_grouped_gemm", x, shape)
            if x_scales is None
            else empty("moe_grouped_gemm", x, shape, "bfloat16")
        )
        fill_zeros(out, stream)
    _C.moe_grouped_gemm(
        stream, x, weight, sorted_pairs, expert_ends, x_scales, weight_scales, shared_weight, gated, routing_ready, out
    )
    return out


class Routing(NamedTuple):
    """The experts of each row, their weights, and (row, expert) pairs as `moe_grouped_gemm` reads them.

    Pairs of row r are r * top_k to r * top_k + top_k - 1. Every row selects shared experts: with S of them, read top_k
    as top_k + S here, and E as E + S.
    """

    topk_ids: Tensor  # [T, top_k] int64, distinct within a row
    topk_weights: Tensor  # [T, top_k] float32
    sorted_pairs: Tensor  # [T * top_k] int64, pairs sorted by expert
    expert_ends: Tensor  # [E] int32, end of each expert's range in `sorted_pairs`


def moe_route(
    scores: Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    activation: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-20,
    n_group: int = 1,
    topk_group: int = 1,
    num_shared: int = 0,
    shared_gate: Tensor | None = None,
    out: Routing | None = None,
    stream: int | None = None,
) -> Routing:
    """Select each row's top-k experts and compute their routing weights: one launch for up to 16 rows and 512 experts.

    With groups a row selects from its `topk_group` best ones. A group's score is that of its best expert with
    "softmax" (DeepSeek-V2, arXiv 2405.04434), and the sum of its two best experts' with "sigmoid" (DeepSeek-V3).

    Args:
        scores: [T, E] router scores (logits), float32, float16 or bfloat16, at most 1024 experts; rows may be strided.
            Ties go to the lower expert id, and NaN counts as -inf.
        top_k: experts per row, 1 to min(E, 32); T * top_k is at most 262144.
        renormalize: softmax over the scores of the selected experts, else over all; sigmoids are divided by their sum
            plus eps.
        activation: weights are the softmax of the scores, or their sigmoids (DeepSeek-V3, arXiv 2412.19437).
        bias: [E] float32, only with "sigmoid": experts are selected by sigmoids plus bias, which weights leave out.
        scale: factor of the weights, above 0.
        eps: added to the sum of sigmoids, 0 to 1.
        n_group: groups of E / n_group adjacent experts, at most 32; several have 2 experts or more each.
        topk_group: groups that a row selects from, 1 to n_group; they have top_k experts or more.
        num_shared: S shared experts, with the ids E to E + S - 1, that follow the selected ones in every row. top_k + S
            is at most 32, E + S at most 1024, T * (top_k + S) at most 262144.
        shared_gate: [T, 1] like scores, only with shared experts: the sigmoid of a row's element is the weight of its
            shared experts, NaN for NaN; None: 1. Rows may be strided.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        Routing: per row the best expert first, shared ones last, and per expert its pairs in row order.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a size, scale or eps out of range; an unknown activation; bias
            with "softmax"; shared_gate without shared experts.
    """
    op = "moe_route"
    if out is None:
        rows, experts = shape_of(op, "scores", scores, 2)
        columns = top_k + num_shared
        out = Routing(
            topk_ids=empty(op, scores, (rows, columns), "int64"),
            topk_weights=empty(op, scores, (rows, columns), "float32"),
            sorted_pairs=empty(op, scores, (rows * columns,), "int64"),
            expert_ends=empty(op, scores, (experts + num_shared,), "int32"),
        )
    elif not isinstance(out, Routing):
        raise wrong_type(op, "out", out, Routing)
    _C.moe_route(
        stream,
        scores,
        top_k,
        renormalize,
        activation,
        bias,
        scale,
        eps,
        n_group,
        topk_group,
        num_shared,
        shared_gate,
        *out,
    )
    return out


def moe_combine(
    expert_outputs: Tensor, topk_weights: Tensor, *, out: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """Sum each row's expert outputs, weighted by its routing weights: in float32, in order, rounded once.

    Args:
        expert_outputs: [T * top_k, H] float32, float16 or bfloat16; row r has outputs r * top_k to r * top_k + top_k -
            1; rows may be strided.
        topk_weights: [T, top_k] float32.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        out [T, H].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, _ = shape_of("moe_combine", "topk_weights", topk_weights, 2)
        out = empty_like(
            "moe_combine", expert_outputs, (rows, shape_of("moe_combine", "expert_outputs", expert_outputs, 2)[1])
        )
    _C.moe_combine(stream, expert_outputs, topk_weights, out)
    return out


def quantize_fp8(
    x: Tensor,
    *,
    group_size: int | None = None,
    scale: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize rows to float8_e4m3fn with dynamic scales, or with a given static one.

    A scale is the largest magnitude of its group over 448, and at least 1e-12. Elements are divided by it and rounded
    to nearest, ties to even, saturating at 448. `small_m_gemm` and `moe_grouped_gemm` read such rows and weights.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2.

    Args:
        x: [T, W] float32, float16 or bfloat16; rows may be strided.
        group_size: 128 for one scale per 128 elements of a row (the last group may be shorter); None for one per row.
        scale: [1] float32, a static scale for all rows; group_size is then None.
        out: preallocated results, None for each one to allocate.
        stream: CUDA stream; None: the current one.

    Returns:
        The quantized rows [T, W] float8_e4m3fn, and the scales [G, T] float32, whose G groups are each aligned to 16
        bytes.

    Raises:
        ValueError: wrong dtype, shape, device or stride; another group_size; both scale and group_size.
    """
    quantized, scales = out
    if quantized is None or scales is None:
        rows, width = shape_of("quantize_fp8", "x", x, 2)
        groups = max(-(-width // (group_size or max(width, 1))), 1)
        quantized = empty("quantize_fp8", x, (rows, width), "float8_e4m3fn") if quantized is None else quantized
        if scales is None:
            scales = empty("quantize_fp8", x, (groups, -(-rows // 4) * 4), "float32")[:, :rows]
    _C.quantize_fp8(stream, x, group_size, scale, quantized, scales)
    return quantized, scales


def dequantize(
    qweight: Tensor, scales: Tensor, *, dtype: str = "bfloat16", out: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """Dequantize FP8 or INT4 weights: elements times their scales, rounded once.

    The inverse of `quantize_fp8`, and the fallback for weights or row counts that `small_m_gemm` does not handle.

    Args:
        qweight: [N, K] float8_e4m3fn, or [N, K / 2] uint8 of INT4: interleaved as for `small_m_gemm`, or, if K is not a
            multiple of 256, adjacent columns in a byte, the first in its lower half.
        scales: [G, N] float32, one group per row or per 128 elements; for INT4 G equal groups, and the four lowest bits
            of a scale hold the zero point.
        dtype: of out, "float32", "float16" or "bfloat16".
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        out [N, K].

    Raises:
        ValueError: wrong dtype, shape, device or stride; another number of groups.
    """
    if out is None:
        rows, width = shape_of("dequantize", "qweight", qweight, 2)
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dequantize: dtype is {dtype}, expected float32, float16 or bfloat16")
        is_int4 = str(qweight.dtype).endswith("uint8")
        out = empty("dequantize", qweight, (rows, 2 * width if is_int4 else width), dtype)
    _C.dequantize(stream, qweight, scales, out)
    return out


def rope_qkv_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    *,
    row_offset: int = 0,
    slots: Tensor | None = None,
    num_valid: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    page_refs: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    layout: Literal["NHD", "HND"] = "NHD",
    status: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Apply RMSNorm (optional) and RoPE to query and key heads, and write keys and values to the KV cache.

    Fuses everything between a layer's QKV projection and its attention. K and V are written as by `write_kv`.

    Args:
        qkv: [B, Q, Hq + 2 * Hkv, D], or packed [T, Hq + 2 * Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16, D
            64, 128 or 256: query, key and value heads of every row; only the last dimension must be contiguous.
        cos_sin: [num_positions, D] float32: per position D / 2 cosines, then D / 2 sines. Elements d and d + D / 2 of a
            head are rotated together, as in Hugging Face models (NeoX style).
        positions: [B, Q] or packed [T] int32; clamped to the table.
        k_pool: [num_pages, page_size, Hkv, D] of qkv's dtype or float8_e4m3fn; only the last dimension must be
            contiguous; changed in place.
        v_pool: like k_pool.
        page_table: [num_slots, max_pages] int32.
        prefix_lens: [num_slots] int32.
        row_offset: added to prefix_lens.
        slots: [B] int32.
        num_valid: [B] int32, rows of each request to write. None: all. Queries are computed for every row.
        cu_seqlens_q: [B + 1] int32. Queries after the last packed request are 0.
        q_norm: [D] of qkv's dtype, weight of a per-head RMSNorm. None: no norm.
        k_norm: the same for keys.
        eps: of both norms, above 0.
        page_refs: [num_pages] int32: pages with more than one owner are not written.
        k_scale: as for `write_kv`.
        v_scale: as for `write_kv`.
        layout: "HND" for pools whose heads come before the rows of a page.
        status: [num_slots] int32, with the bits of `write_kv`.
        out: preallocated result.
        stream: CUDA stream; None: the current one.

    Returns:
        The queries [B, Q, Hq, D], or [T, Hq, D].

    Raises:
        ValueError: wrong dtype, shape, device or stride; a scale that `write_kv` refuses.
    """
    k_pool, v_pool = as_nhd("rope_qkv_write_kv", layout, k_pool, v_pool)
    if out is None:
        *rows, heads, head_dim = shape_of("rope_qkv_write_kv", "qkv", qkv, 4 if cu_seqlens_q is None else 3)
        kv_heads = shape_of("rope_qkv_write_kv", "k_pool", k_pool, 4)[2]
        out = empty_like("rope_qkv_write_kv", qkv, (*rows, max(heads - 2 * kv_heads, 0), head_dim))
    _C.rope_qkv_write_kv(
        stream, qkv, cos_sin, positions, k_pool, v_pool, page_table, prefix_lens, row_offset, slots, num_valid,
        cu_seqlens_q, q_norm, k_norm, eps, page_refs, k_scale, v_scale, status, out,
    )  # fmt: skip
    return out
