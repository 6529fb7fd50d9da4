"""Cases of the layer ops, in the shapes of an 8B model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import specdec_kernels as sd
from specdec_kernels.models.layers.moe import routing_of
from specdec_kernels.reference import layers as reference

from ..check import bytes_of, expect_equal, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from .kv import KV_HEADS, PAGE_SIZE, slots_of_rows

Q_HEADS, HEAD_DIM = 32, 128
NOPE, ROPE, LATENT, V_DIM = 192, 64, 512, 256  # of GLM-4.7-Flash's latent attention
EPS = 1e-6
VOCAB = 32000
ERROR = 8e-3  # of 16-bit results


def random(p: Params, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, p["dtype"]))


def add_rms_norm(device: torch.device, p: Params) -> Work:
    """Normalize after a residual addition, as layers do."""
    x, residual = (random(p, device, p["rows"], p["width"]) for _ in range(2))
    weight = random(p, device, p["width"])
    out, total = (poisoned(*x.shape, dtype=x.dtype, device=device) for _ in range(2))
    want, want_total = reference.add_rms_norm(x, weight, EPS, residual)

    def plain() -> Tensor:
        return functional.rms_norm(x + residual, x.shape[1:], weight, EPS)

    def check() -> None:
        expect_near("out", out, want, ERROR)
        expect_near("sum", total, want_total, ERROR)

    return Work(
        call=lambda: sd.add_rms_norm(x, weight, EPS, residual=residual, out=(out, total)),
        check=check,
        bytes_moved=bytes_of(x, residual, weight, out, total),
        just_written=[x, residual],
        baseline=Baseline("torch", plain, lambda got: expect_near("out", got, want, 2 * ERROR)),
    )


def rms_norm_concat(device: torch.device, p: Params) -> Work:
    """Look up embeddings in a table larger than any cache, with features concatenated in another order."""
    rows, width = p["rows"], p["width"]
    embeddings, features = random(p, device, VOCAB, width), random(p, device, rows, width)
    tokens = torch.randint(VOCAB, (rows,), dtype=torch.int32, device=device)
    feature_rows = torch.randperm(rows, device=device).int()
    weights = [random(p, device, width) for _ in range(2)]
    out, selected = (poisoned(rows, n, dtype=features.dtype, device=device) for n in (2 * width, width))
    want, want_selected = reference.rms_norm_concat(
        embeddings, tokens, weights[0], features, weights[1], EPS, feature_rows
    )

    def call() -> object:
        return sd.rms_norm_concat(
            embeddings, tokens, weights[0], features, weights[1], EPS,
            feature_rows=feature_rows, out=(out, selected),
        )  # fmt: skip

    def check() -> None:
        expect_near("out", out, want, ERROR)
        expect_near("features", selected, want_selected, 0)

    moved = 3 * bytes_of(features) + bytes_of(out, tokens, feature_rows, *weights)
    return Work(call, check, moved, just_written=[features])


def gated_rms_norm(device: torch.device, p: Params) -> Work:
    heads = p["width"] // HEAD_DIM
    x, gate = (random(p, device, p["rows"], heads, HEAD_DIM) for _ in range(2))
    weight = random(p, device, HEAD_DIM)
    out = torch.empty_like(gate).fill_(torch.nan)
    want = reference.gated_rms_norm(x, gate, weight, EPS)

    def plain() -> Tensor:
        return functional.rms_norm(x, (HEAD_DIM,), weight, EPS) * functional.silu(gate)

    return Work(
        call=lambda: sd.gated_rms_norm(x, gate, weight, EPS, out=out),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(x, gate, weight, out),
        just_written=[x],
        baseline=Baseline("torch", plain, lambda got: expect_near("out", got, want, 4 * ERROR)),
    )


def silu_and_mul(device: torch.device, p: Params) -> Work:
    x = random(p, device, p["rows"], 2 * p["width"])
    out = poisoned(p["rows"], p["width"], dtype=x.dtype, device=device)
    want = reference.silu_and_mul(x)

    def plain() -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Work(
        call=lambda: sd.silu_and_mul(x, out=out),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(x, out),
        just_written=[x],
        baseline=Baseline("torch", plain, lambda got: expect_near("out", got, want, 2 * ERROR)),
    )


def small_m_gemm(device: torch.device, p: Params) -> Work:
    x, weight = random(p, device, p["rows"], p["width"]), random(p, device, p["outs"], p["width"])
    out = poisoned(p["rows"], p["outs"], dtype=x.dtype, device=device)
    want = reference.small_m_gemm(x.cpu(), weight.cpu())
    return Work(
        call=lambda: sd.small_m_gemm(x, weight, out=out),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(x, weight, out),
        just_written=[x],
        flops=2 * x.shape[0] * weight.numel(),
        baseline=Baseline(
            "torch", lambda: functional.linear(x, weight), lambda got: expect_near("out", got, want, ERROR)
        ),
    )


def small_m_bmm(device: torch.device, p: Params) -> Work:
    """Multiply as latent attention does: queries by a weight contiguous along columns, outputs by one along rows."""
    rows, heads = p["rows"], p["heads"]
    if p["product"] == "queries":
        x, weight = random(p, device, rows, heads, NOPE + ROPE)[..., :NOPE], random(p, device, heads, NOPE, LATENT)
    else:
        x, weight = random(p, device, rows, heads, LATENT), random(p, device, heads, V_DIM, LATENT).mT
    out = poisoned(rows, heads, weight.shape[2] + ROPE, dtype=x.dtype, device=device)[..., : weight.shape[2]]
    want = reference.small_m_bmm(x.cpu(), weight.cpu())

    def plain() -> Tensor:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out

    return Work(
        call=lambda: sd.small_m_bmm(x, weight, out=out),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(x, weight, out),
        just_written=[x],
        flops=2 * rows * weight.numel(),
        baseline=Baseline("torch", plain, lambda got: expect_near("out", got, want, ERROR)),
    )


def quantize_fp8(device: torch.device, p: Params) -> Work:
    """Quantize by groups of 128. A value between two FP8 values may round to either: an ulp of its scale decides."""
    x = random(p, device, p["rows"], p["width"])
    quantized = torch.full_like(x, torch.nan, dtype=torch.float8_e4m3fn)
    scales = poisoned(p["width"] // 128, -(-len(x) // 4) * 4, dtype=torch.float32, device=device)[:, : len(x)]
    want, want_scales = reference.quantize_fp8(x, group_size=128)

    def check() -> None:
        expect_near("out", quantized.float(), want.float(), 1e-2)
        expect_near("scales", scales, want_scales, 1e-6)

    return Work(
        call=lambda: sd.quantize_fp8(x, group_size=128, out=(quantized, scales)),
        check=check,
        bytes_moved=bytes_of(x, quantized, scales),
        just_written=[x],
        baseline=Baseline(
            "torch",
            lambda: reference.quantize_fp8(x, group_size=128),
            lambda got: expect_near("out", got[0].float(), want.float(), 1e-2),
        ),
    )


def dequantize(device: torch.device, p: Params) -> Work:
    """Dequantize INT4 in groups of 128."""
    outs, width = p["outs"], p["width"]
    qweight = torch.randint(256, (outs, width // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(width // 128, outs, device=device)
    out = poisoned(outs, width, dtype=getattr(torch, p["dtype"]), device=device)
    want = reference.dequantize(qweight, scales).float().to(out.dtype)
    return Work(
        call=lambda: sd.dequantize(qweight, scales, out=out),
        check=lambda: expect_near("out", out, want, 0),
        bytes_moved=bytes_of(qweight, scales, out),
    )


def moe_route(device: torch.device, p: Params) -> Work:
    scores, top_k = random(p, device, p["rows"], p["experts"]), p["top_k"]
    want = reference.moe_route(scores, top_k, renormalize=True)
    out = sd.Routing(*(torch.full_like(part, -1) for part in want._replace(topk_weights=want.topk_weights.float())))

    def check() -> None:
        for name in ("topk_ids", "sorted_pairs", "expert_ends"):
            expect_equal(name, getattr(out, name), getattr(want, name))
        expect_near("topk_weights", out.topk_weights, want.topk_weights, 1e-6)

    def plain() -> Tensor:
        weights, experts = scores.softmax(-1, dtype=torch.float32).topk(top_k)
        routing = routing_of(experts, weights / weights.sum(-1, keepdim=True), scores.shape[1])
        topk_weights: Tensor = routing.topk_weights
        return topk_weights

    return Work(
        call=lambda: sd.moe_route(scores, top_k, renormalize=True, out=out),
        check=check,
        bytes_moved=bytes_of(scores, *out),
        just_written=[scores],
        baseline=Baseline("torch", plain, lambda got: expect_near("topk_weights", got, want.topk_weights, 1e-6)),
    )


def moe_combine(device: torch.device, p: Params) -> Work:
    outputs = random(p, device, p["rows"] * p["top_k"], p["width"])
    weights = torch.rand(p["rows"], p["top_k"], device=device)
    out = poisoned(p["rows"], p["width"], dtype=outputs.dtype, device=device)
    want = reference.moe_combine(outputs, weights)

    def plain() -> Tensor:
        return (outputs.view(*weights.shape, -1) * weights[..., None]).sum(1).to(outputs.dtype)

    return Work(
        call=lambda: sd.moe_combine(outputs, weights, out=out),
        check=lambda: expect_near("out", out, want, ERROR),
        bytes_moved=bytes_of(outputs, weights, out),
        just_written=[outputs],
        baseline=Baseline("torch", plain, lambda got: expect_near("out", got, want, ERROR)),
    )


def rope_qkv_write_kv(device: torch.device, p: Params) -> Work:
    batch, rows = p["batch"], p["rows"]
    lens, table, place = slots_of_rows(batch, rows, device)
    qkv = random(p, device, batch, rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    q_norm, k_norm = (random(p, device, HEAD_DIM) for _ in "qk")
    angles = torch.rand(64, HEAD_DIM // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(64, (batch, rows), dtype=torch.int32, device=device)
    shape = (table.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k_pool, v_pool = (torch.zeros(shape, dtype=qkv.dtype, device=device) for _ in "kv")
    out = poisoned(batch, rows, Q_HEADS, HEAD_DIM, dtype=qkv.dtype, device=device)

    def check() -> None:
        q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=2)
        keys = k_pool.flatten(0, 1)[place]
        for name, got, heads, norm in (("q", out, q, q_norm), ("k_pool", keys, k, k_norm)):
            want = reference.rotate(reference.norm(heads, norm, EPS), cos_sin, positions)
            expect_near(name, got, want, ERROR)
        expect_near("v_pool", v_pool.flatten(0, 1)[place], v, 0)

    return Work(
        call=lambda: sd.rope_qkv_write_kv(
            qkv, cos_sin, positions, k_pool, v_pool, table, lens, q_norm=q_norm, k_norm=k_norm, out=out
        ),
        check=check,
        bytes_moved=2 * bytes_of(qkv) + bytes_of(positions, lens),
        just_written=[qkv],
    )


ROWS = (1, 6, 64, 384, 2048)
CASES = (
    Case("add_rms_norm", grid={"rows": ROWS, "width": (4096,), "dtype": ("bfloat16",)}, make=add_rms_norm),
    Case("rms_norm_concat", grid={"rows": ROWS[:-1], "width": (4096,), "dtype": ("bfloat16",)}, make=rms_norm_concat),
    Case("gated_rms_norm", grid={"rows": ROWS, "width": (4096,), "dtype": ("bfloat16",)}, make=gated_rms_norm),
    Case("silu_and_mul", grid={"rows": ROWS, "width": (12288,), "dtype": ("bfloat16",)}, make=silu_and_mul),
    Case(
        "small_m_gemm",
        grid={"rows": (1, 16, 64, 128), "width": (4096, 12288), "outs": (4096, 6144, 24576), "dtype": ("bfloat16",)},
        cpu_grid={"rows": (1, 6), "width": (1024,), "outs": (1024,), "dtype": ("bfloat16",)},
        make=small_m_gemm,
    ),
    Case(
        "small_m_bmm",
        grid={"rows": (1, 4, 16, 32), "heads": (20,), "product": ("queries", "outputs"), "dtype": ("bfloat16",)},
        cpu_grid={"rows": (1,), "heads": (2,), "product": ("queries", "outputs"), "dtype": ("bfloat16",)},
        make=small_m_bmm,
    ),
    Case(
        "dequantize",
        grid={"outs": (4096, 24576), "width": (4096,), "dtype": ("bfloat16",)},
        cpu_grid={"outs": (64,), "width": (1024,), "dtype": ("bfloat16",)},
        make=dequantize,
    ),
    Case("quantize_fp8", grid={"rows": ROWS, "width": (4096, 12288), "dtype": ("bfloat16",)}, make=quantize_fp8),
    Case(
        "moe_route",
        grid={"rows": ROWS, "experts": (128,), "top_k": (8,), "dtype": ("bfloat16",)},
        make=moe_route,
    ),
    Case(
        "moe_combine",
        grid={"rows": ROWS, "top_k": (8,), "width": (2048,), "dtype": ("bfloat16",)},
        make=moe_combine,
    ),
    Case(
        "rope_qkv_write_kv",
        grid={"batch": (1, 16, 64), "rows": (1, 6, 32), "dtype": ("bfloat16",)},
        make=rope_qkv_write_kv,
    ),
)
