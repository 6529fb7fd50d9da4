"""References of the layer ops, in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import Routing
from .kv import write_kv

LARGEST_FP8 = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-12  # of rows of zeros


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return norm(total, weight, eps), total


def rms_norm_concat(
    embeddings: Tensor,
    tokens: Tensor,
    embedding_weight: Tensor,
    features: Tensor,
    feature_weight: Tensor,
    eps: float,
    feature_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the concatenated rows in float64, and the gathered features."""
    embedded = embeddings[tokens.long().clamp(0, len(embeddings) - 1)]
    if feature_rows is None:
        features = features[: len(tokens)]
    else:
        features = features[feature_rows.long().clamp(0, len(features) - 1)]
    return torch.cat([norm(embedded, embedding_weight, eps), norm(features, feature_weight, eps)], dim=-1), features


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool = False, activation: str = "silu"
) -> Tensor:
    """Apply RMSNorm over the last dimension, and a gate to its result or to its input."""
    factors = getattr(functional, activation)(gate.double())
    weight = weight.double().view(-1, x.shape[-1])
    return norm(x.double() * factors, weight, eps) if gates_first else norm(x, weight, eps) * factors


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE to heads [B, Q, H, D] at positions [B, Q]."""
    cosine, sine = cos_sin.double()[positions.clamp(0, len(cos_sin) - 1).long()].unsqueeze(2).chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return the queries in float64. Keys are rounded once, to the pools' dtype."""
    heads = k_pool.shape[2]
    q, k, v = torch.split(qkv, [qkv.shape[2] - 2 * heads, heads, heads], dim=2)
    q, k = (x if weight is None else norm(x, weight, eps) for x, weight in ((q, q_norm), (k, k_norm)))
    k = rotate(k, cos_sin, positions).to(k_pool.dtype)
    write_kv(k, v, k_pool, v_pool, page_table, prefix_lens, row_offset, slots, num_valid)
    return rotate(q, cos_sin, positions)


def small_m_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    x = x.double() if x_scales is None else x.double() * expand_scales(x_scales, x.shape[1])
    if weight_scales is None:
        weight = weight.double()
    elif x_scales is None:
        weight = dequantize_int4(weight, weight_scales)
    else:
        weight = weight.double() * expand_scales(weight_scales, weight.shape[1])
    out = x @ weight.T
    if bias is not None:
        out = out + bias.double()
    return silu_and_mul(out) if gated else out


def small_m_bmm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("mhk,hkn->mhn", x.double(), weight.double())


def moe_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    sorted_pairs: Tensor,
    expert_ends: Tensor,
    *,
    weight_scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    gated: bool = False,
    shared_weight: Tensor | None = None,
) -> Tensor:
    """Multiply pair by pair in float64; NaN for pairs of no expert."""
    x = x.double() if x_scales is None else x.double() * expand_scales(x_scales, x.shape[1])
    out = x.new_full((len(sorted_pairs), weight.shape[1] // 2 if gated else weight.shape[1]), torch.nan)
    weights = list(weight.double())
    if weight_scales is not None:
        weights = [w * expand_scales(scales, x.shape[1]) for w, scales in zip(weights, weight_scales, strict=True)]
    if shared_weight is not None:
        weights += split_shared_weight(shared_weight.double(), len(expert_ends) - len(weight), gated)
    begin = 0
    for wide, end in zip(weights, expert_ends.tolist(), strict=True):
        for pair in sorted_pairs[begin:end].tolist():
            product = wide @ x[pair * len(x) // len(sorted_pairs)]
            out[pair] = silu_and_mul(product[None])[0] if gated else product
        begin = end
    return out


def split_shared_weight(weight: Tensor, num_shared: int, gated: bool) -> list[Tensor]:
    """Return the weights of shared experts [N, K], of gated ones [2 * N, K], from that of the MLP they are parts of."""
    if not gated:
        return list(weight.chunk(num_shared, 1))
    gate, up = weight.chunk(2)
    return [torch.cat(parts) for parts in zip(gate.chunk(num_shared), up.chunk(num_shared), strict=True)]


def moe_route(
    scores: Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    activation: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-20,
    n_group: int = 1,
    topk_group: int = 1,
    num_shared: int = 0,
    shared_gate: Tensor | None = None,
) -> Routing:
    """Route in float64."""
    wide = scores.double()
    wide = wide.masked_fill(wide.isnan(), -torch.inf)
    is_sigmoid = activation == "sigmoid"
    if is_sigmoid:
        weights = wide.sigmoid()
        choice = weights if bias is None else weights + bias.double()
        choice = choice.masked_fill(scores.isnan(), -torch.inf)
    else:
        # The largest score has the weight 1, even if it is infinite.
        largest = wide.amax(1, keepdim=True)
        weights = torch.where(wide == largest, 0, wide - largest).exp()
        choice = wide
    if n_group > 1:
        groups = choice.view(len(choice), n_group, -1)
        best = groups.topk(2).values.sum(-1) if is_sigmoid else groups.amax(-1)
        kept = best.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        order = torch.where(dropped[..., None], 1, 0).expand_as(groups).flatten(1)  # after all experts of kept groups
        by_score = choice.sort(dim=1, descending=True, stable=True).indices
        by_group = order.gather(1, by_score).sort(dim=1, stable=True).indices
        topk_ids = by_score.gather(1, by_group)[:, :top_k]
    else:
        topk_ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    selected = weights.gather(1, topk_ids)
    if is_sigmoid:
        topk_weights = scale * (selected / (selected.sum(1, keepdim=True) + eps) if renormalize else selected)
    else:
        topk_weights = scale * selected / (selected if renormalize else weights).sum(1, keepdim=True)
    shared_ids = scores.shape[1] + torch.arange(num_shared, device=scores.device)
    shared_weights = topk_weights.new_ones(len(scores), 1) if shared_gate is None else shared_gate.double().sigmoid()
    topk_ids = torch.cat([topk_ids, shared_ids.expand(len(scores), -1)], 1)
    topk_weights = torch.cat([topk_weights, shared_weights.expand(-1, num_shared)], 1)
    flat, sorted_pairs = topk_ids.flatten().sort(stable=True)
    all_experts = torch.arange(scores.shape[1] + num_shared, device=scores.device)
    expert_ends = torch.searchsorted(flat, all_experts, right=True, out_int32=True)
    return Routing(topk_ids, topk_weights, sorted_pairs, expert_ends)


def moe_combine(expert_outputs: Tensor, topk_weights: Tensor) -> Tensor:
    return (
        expert_outputs.double().view(*topk_weights.shape, expert_outputs.shape[1]) * topk_weights.double()[..., None]
    ).sum(1)


def quantize_fp8(x: Tensor, *, group_size: int | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize in float32, in which the op's arithmetic is exact."""
    wide = x.float()
    if scale is None:
        size = group_size or wide.shape[1]
        padded = functional.pad(wide, (0, -wide.shape[1] % size))
        scales = padded.view(len(x), padded.shape[1] // size, size).abs().amax(-1).t() / LARGEST_FP8
    else:
        scales = scale.expand(1, len(x))
    scales = scales.clamp(min=SMALLEST_SCALE)
    scaled = wide / expand_scales(scales, wide.shape[1])
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


def expand_scales(scales: Tensor, width: int) -> Tensor:
    """Expand scales [groups, T] to [T, width]: the factor of each element."""
    return scales.t().repeat_interleave(width if len(scales) == 1 else 128, 1)[:, :width]


def dequantize(qweight: Tensor, scales: Tensor) -> Tensor:
    if qweight.dtype == torch.uint8:
        return dequantize_int4(qweight, scales)
    return qweight.double() * expand_scales(scales, qweight.shape[1])


def dequantize_int4(weight: Tensor, scales: Tensor) -> Tensor:
    """Dequantize a 4-bit weight [N, K / 2] to [N, K]. The four lowest bits of a scale are the zero point."""
    columns = torch.arange(2 * weight.shape[1], device=weight.device)
    byte, nibble = columns // 2, columns % 2
    if len(columns) % 256 == 0:
        step, at = columns % 256 // 16, columns % 16
        in_word = step % 2 * 2 + at // 8 + at % 2 * 4
        byte = columns // 256 * 128 + ((step // 8 * 4 + at % 8 // 2) * 4 + step % 8 // 2) * 4 + in_word // 2
        nibble = in_word % 2
    values = weight[:, byte] >> (nibble * 4) & 15
    bits, size = scales.contiguous().view(torch.int32), len(columns) // len(scales)
    zeros, factors = (x.t().repeat_interleave(size, 1) for x in (bits & 15, (bits & ~15).view(torch.float32)))
    return (values.double() - zeros) * factors.double()
