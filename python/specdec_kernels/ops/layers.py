"""Layer ops: RMSNorm with residual, SwiGLU, small-M GEMM, MoE routing and grouped GEMM,
FP8 and INT4 quantization, RoPE with KV write.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _C
from ._alloc import empty, empty_like, fill_zeros, shape_of, wrong_type
from ._tensor import Tensor


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    shares: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    out_scales: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row over its root mean square, times a weight; with `residual`, of the sum of both.

    Sums and products are float32; what is normalised is the sum as it is stored. On a GPU the op reads `weight` before
    the kernel launched ahead of it has finished: that one must not write it.

    Args:
        x: [T, H] float32, float16 or bfloat16; rows may be strided, here and below.
        weight: [H] of the same dtype.
        eps: added to the mean square, above 0.
        residual: [T, H] like x, added to it.
        shares: [T, taken] float32, beside a residual: x is then [T * taken, H], of which `moe_combine` would make what
            is added to the residual, with the same bits.
        out: the two results, None for one that is to be allocated. The second may be x or residual, and is None without
            a residual.
        out_scales: [G, T] float32, to be written: the rows are then float8_e4m3fn, the very numbers and scales that
            `quantize_fp8` makes of them, for whole rows (G is 1) or groups of 128. On a GPU rows then start on 16
            bytes.

    Returns:
        The rows [T, H], and x + residual [T, H]; without a residual, x itself.

    Raises:
        ValueError: wrong dtype, shape, device or stride; out[1] or shares without a residual; out_scales of rows off 16
            bytes.
    """
    rows, total = out
    shape = shape_of("add_rms_norm", "x", x, 2)
    if shares is not None:
        shape = shape_of("add_rms_norm", "shares", shares, 2)[0], shape[1]
    if rows is None:
        rounded = out_scales is not None
        rows = empty("add_rms_norm", x, shape, "float8_e4m3fn") if rounded else empty_like("add_rms_norm", x, shape)
    if residual is not None and total is None:
        total = empty_like("add_rms_norm", x, shape)
    _C.add_rms_norm(stream, x, weight, eps, shares, residual, total, out_scales, rows)
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
    """What an EAGLE-3 layer reads: the embeddings of tokens beside a feature each, both over their root mean squares.

    On a GPU the op reads the norms' weights before the kernel launched ahead of it has finished: that one must not
    write them.

    Args:
        embeddings: [V, H] float32, float16 or bfloat16; rows may be strided, here and below.
        tokens: [T] int32. A number outside a table, here and below, takes its nearest row.
        features: [F, H] like embeddings.
        feature_rows: [T] int32, the feature of each row; None: feature i is row i's, and F is T or more.
        embedding_weight, feature_weight: [H] of the same dtype, of the norms.
        eps: of both norms, above 0.
        out: the two results, None for one that is to be allocated.

    Returns:
        The pairs [T, 2 * H], embeddings first, and the features of the rows [T, H] as they were.

    Raises:
        ValueError: wrong dtype, shape, device or stride; an empty table.
    """
    pairs, kept = out
    if pairs is None or kept is None:
        (rows,) = shape_of("rms_norm_concat", "tokens", tokens, 1)
        _, width = shape_of("rms_norm_concat", "embeddings", embeddings, 2)
        pairs = empty_like("rms_norm_concat", embeddings, (rows, 2 * width)) if pairs is None else pairs
        kept = empty_like("rms_norm_concat", embeddings, (rows, width)) if kept is None else kept
    _C.rms_norm_concat(
        stream, embeddings, tokens, embedding_weight, features, feature_rows, feature_weight, eps, pairs, kept
    )
    return pairs, kept


def silu_and_mul(x: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """silu(gate) * up of rows that hold both side by side, in float32, rounded once.

    Args:
        x: [T, 2 * I] float32, float16 or bfloat16: gate, then up; rows may be strided.

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
    """Rows times a weight: `x @ weight.T + bias`, summed in float32, a few at the speed of reading the weight.

    The bits of a row do not depend on what is beside it, nor on how much. cuBLAS is quicker with more than 128 rows:
    the op reads the weight once for every 128 of them (Hopper) or 8. On Hopper it reads `weight` before the kernel
    launched before it on the stream has finished, which must therefore not be what writes it.

    Args:
        x: [M, K] float16 or bfloat16, at most 262144 rows, K a multiple of 64.
        weight: [N, K]; rows of both may be strided, and start on 16 bytes. Gated: [2 * N, K], those of the gate and
            then of up, N a multiple of 8.
        bias: of as many numbers and of out's dtype; None for none.
        x_scales, weight_scales: of float8_e4m3fn x and weight, [G, M] and [G, N] float32, whose groups start on 16
            bytes; one group of whole rows, or one of each 128 numbers, as `quantize_fp8` gives them. K is then a
            multiple of 128 and N of 16, a GPU one of Hopper, and out bfloat16, unless an out of float16 is given.
            weight_scales alone: of 4 bits, a weight [N, K / 2] uint8 of numbers 0 to 15 in the order of `nibble_of`
            (csrc/layers/gemm/small_m_gemm.h), K a multiple of 256 and N of 16; scales are as above, and the four
            lowest bits of each are the number that stands for 0. x has 16 bits.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        plan: forces a kernel, for tests and benchmarks: "sm80.mma", or on Hopper "sm90.wgmma", which it has by itself
            unless rows of `x` or `weight` overlap. The latter alone takes numbers of fewer bits.

    Returns:
        out [M, N].

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many rows; rows off 16 bytes; a plan that does not exist
            or that the device cannot run.
    """
    if out is None:
        rows, _ = shape_of("small_m_gemm", "x", x, 2)
        outs = shape_of("small_m_gemm", "weight", weight, 2)[0]
        shape = rows, outs // 2 if gated else outs
        out = empty_like("small_m_gemm", x, shape) if x_scales is None else empty("small_m_gemm", x, shape, "bfloat16")
    _C.small_m_gemm(stream, x, weight, bias, x_scales, weight_scales, gated, plan, out)
    return out


def moe_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    ends: Tensor,
    *,
    weight_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    gated: bool = False,
    again: bool = False,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Rows times the weights of the experts that they take: each weight that is taken is read once for every 32 rows
    that take it (16 where weights have scales, 8 where there are no more rows), and no other.

    Sums are float32. The bits of a row do not depend on what is beside it.

    Args:
        x: [T, K] float16 or bfloat16; with scales float8_e4m3fn, as `quantize_fp8` gives it. K is a multiple of 64,
            or of 128 where weights have scales; rows may be strided, and start on 16 bytes.
        weight: [E, N, K] like x, or float8_e4m3fn with scales, at most 1024 experts, N a multiple of 16; gated: [E,
            2 * N, K], of each expert first the rows of the gate, N a multiple of 8.
        order: [M] int64, pairs of a row and an expert that it takes, by experts; M is a multiple of T, at most 262144,
            and pair i is of row i * T / M. Pairs that do not exist are taken for the nearest.
        ends: [E] int32, where the pairs of each expert end in `order`, and those of the next begin.
        weight_scales: [E, G, N] float32, or 2 * N of a gate: one group of whole rows, or one of each 128 numbers.
        x_scales: [G, T] float32, of as many groups.
        gated: return silu(gate) * up, as `silu_and_mul` would, rounded once.
        again: a call with these `order` and `ends` was launched on the stream since they were written, as that of gate
            and up is before that of down. On Hopper this one then reads them, and `weight`, before the kernel launched
            before it has finished, which must therefore not be what writes one of them.

    Returns:
        out [M, N], of each pair, in x's dtype; with x_scales bfloat16, unless an out of float16 is given. Rows of pairs
        that `order` does not have, or not before an end, stay as they are; without an out they are zeros.

    Raises:
        ValueError: wrong dtype, shape, device or stride; too many experts or pairs; rows off 16 bytes.
    """
    if out is None:
        outs = shape_of("moe_grouped_gemm", "weight", weight, 3)[1]
        shape = shape_of("moe_grouped_gemm", "order", order, 1)[0], outs // 2 if gated else outs
        out = (
            empty_like("moe_grouped_gemm", x, shape)
            if x_scales is None
            else empty("moe_grouped_gemm", x, shape, "bfloat16")
        )
        fill_zeros(out, stream)
    _C.moe_grouped_gemm(stream, x, weight, order, ends, x_scales, weight_scales, gated, again, out)
    return out


class Routing(NamedTuple):
    """Which experts rows take, what counts of each, and the pairs of a row and an expert as `moe_grouped_gemm` takes
    them: those of row r are r * J to r * J + J - 1."""

    experts: Tensor  # [T, J] int64, no expert twice in a row
    shares: Tensor  # [T, J] float32
    order: Tensor  # [T * J] int64, pairs by experts
    ends: Tensor  # [E] int32, where each expert's pairs in `order` end


def moe_route(
    scores: Tensor,
    taken: int,
    *,
    normalised: bool = False,
    out: Routing | None = None,
    stream: int | None = None,
) -> Routing:
    """The experts with the best scores of each row, and their shares, in one launch for up to 64 rows and 256 experts.

    Args:
        scores: [T, E] float32, float16 or bfloat16, at most 1024 experts; rows may be strided. Ties go to the lower
            number, and NaN counts as -inf.
        taken: J, how many experts each row takes, 1 to min(E, 32); T * J is at most 262144.
        normalised: shares are the softmax over the scores of the experts taken, and not over all.

    Returns:
        Routing, of each row the best expert first, and of each expert the pairs by rows.

    Raises:
        ValueError: wrong dtype, shape, device or stride; a number out of range.
    """
    op = "moe_route"
    if out is None:
        rows, experts = shape_of(op, "scores", scores, 2)
        out = Routing(
            experts=empty(op, scores, (rows, taken), "int64"),
            shares=empty(op, scores, (rows, taken), "float32"),
            order=empty(op, scores, (rows * taken,), "int64"),
            ends=empty(op, scores, (experts,), "int32"),
        )
    elif not isinstance(out, Routing):
        raise wrong_type(op, "out", out, Routing)
    _C.moe_route(stream, scores, taken, normalised, *out)
    return out


def moe_combine(made: Tensor, shares: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """What the experts of each row made of it, as one sum by their shares: in float32, in order, rounded once.

    Args:
        made: [T * J, H] float32, float16 or bfloat16: those of row r are r * J to r * J + J - 1; rows may be strided.
        shares: [T, J] float32.

    Returns:
        out [T, H].

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    if out is None:
        rows, _ = shape_of("moe_combine", "shares", shares, 2)
        out = empty_like("moe_combine", made, (rows, shape_of("moe_combine", "made", made, 2)[1]))
    _C.moe_combine(stream, made, shares, out)
    return out


def quantize_fp8(
    x: Tensor,
    *,
    group_size: int | None = None,
    scale: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows as float8_e4m3fn and the scales that give them back: a scale is the largest of its numbers over 448, and at
    least 1e-12; each number is divided by it and rounded to nearest, ties to even. Beyond 448 is 448.

    Both sides of a product of 8 bits (`small_m_gemm`) are such rows. Source: DeepSeek-V3 (arXiv
    2412.19437), section 3.3.2.

    Args:
        x: [T, W] float32, float16 or bfloat16; rows may be strided.
        group_size: 128: a scale for each 128 numbers of a row, the last of them of what is left; None: one for a row.
        scale: [1] float32, of all rows, instead; group_size is then None.
        out: the two results, None for one that is to be allocated.

    Returns:
        The numbers [T, W] float8_e4m3fn, and the scales [G, T] float32, G groups that each start on 16 bytes.

    Raises:
        ValueError: wrong dtype, shape, device or stride; another group_size; a scale beside one.
    """
    numbers, scales = out
    if numbers is None or scales is None:
        rows, width = shape_of("quantize_fp8", "x", x, 2)
        groups = max(-(-width // (group_size or max(width, 1))), 1)
        numbers = empty("quantize_fp8", x, (rows, width), "float8_e4m3fn") if numbers is None else numbers
        if scales is None:
            scales = empty("quantize_fp8", x, (groups, -(-rows // 4) * 4), "float32")[:, :rows]
    _C.quantize_fp8(stream, x, group_size, scale, numbers, scales)
    return numbers, scales


def dequantize(
    numbers: Tensor, scales: Tensor, *, dtype: str = "bfloat16", out: Tensor | None = None, stream: int | None = None
) -> Tensor:
    """What numbers of 8 or 4 bits stand for: times their scales, rounded once. The other way of `quantize_fp8`, and
    what stands for a weight of `small_m_gemm` where that does not multiply.

    Args:
        numbers: [N, K] float8_e4m3fn, or [N, K / 2] uint8 of 4 bits: as in `small_m_gemm`, or where K is no multiple of
            256, neighbours in a byte, the first in its lower half.
        scales: [G, N] float32, one group of whole rows, or one of each 128 numbers; of 4 bits G equal groups, and the
            four lowest bits of a scale are the number that stands for 0.
        dtype: of out, "float32", "float16" or "bfloat16".

    Returns:
        out [N, K].

    Raises:
        ValueError: wrong dtype, shape, device or stride; another number of groups.
    """
    if out is None:
        rows, width = shape_of("dequantize", "numbers", numbers, 2)
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dequantize: dtype is {dtype}, expected float32, float16 or bfloat16")
        in_4_bits = str(numbers.dtype).endswith("uint8")
        out = empty("dequantize", numbers, (rows, 2 * width if in_4_bits else width), dtype)
    _C.dequantize(stream, numbers, scales, out)
    return out


def rope_qkv_write_kv(
    qkv: Tensor,
    rotations: Tensor,
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
    status: Tensor | None = None,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """What stands between a layer's query-key-value product and its attention, in one pass: query and key heads are
    normalised and rotated, and keys and values are written to the slots' pages as `write_kv` writes them.

    Args:
        qkv: [B, Q, Hq + 2 * Hkv, D], or packed [T, Hq + 2 * Hkv, D] with cu_seqlens_q; float32, float16 or bfloat16,
            D 64, 128 or 256: query, key and value heads of every row; free strides except the last.
        rotations: [num_positions, D] float32: for each position the cosines of D / 2 angles, then their sines. Number d
            of a head is rotated with number d + D / 2, as Hugging Face models have it.
        positions: [B, Q] or packed [T] int32; one outside the table takes the nearest there is.
        k_pool, v_pool, page_table, prefix_lens, row_offset, num_valid, cu_seqlens_q, page_refs, k_scale, v_scale,
            status: those of `write_kv`. Queries are computed for every row; behind the last packed request they are 0.
        q_norm, k_norm: [D] of qkv's dtype, weights of a root mean square norm of each head; None for none.
        eps: of both norms, above 0.

    Returns:
        The queries [B, Q, Hq, D], or [T, Hq, D].

    Raises:
        ValueError: wrong dtype, shape, device or stride; a scale that `write_kv` refuses.
    """
    if out is None:
        *rows, heads, head_dim = shape_of("rope_qkv_write_kv", "qkv", qkv, 4 if cu_seqlens_q is None else 3)
        kv_heads = shape_of("rope_qkv_write_kv", "k_pool", k_pool, 4)[2]
        out = empty_like("rope_qkv_write_kv", qkv, (*rows, max(heads - 2 * kv_heads, 0), head_dim))
    _C.rope_qkv_write_kv(
        stream,
        qkv,
        rotations,
        positions,
        k_pool,
        v_pool,
        page_table,
        prefix_lens,
        row_offset,
        slots,
        num_valid,
        cu_seqlens_q,
        q_norm,
        k_norm,
        eps,
        page_refs,
        k_scale,
        v_scale,
        status,
        out,
    )
    return out
