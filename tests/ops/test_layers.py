"""Ops of layers: RMSNorm, SwiGLU, small-M and expert GEMMs, MoE routing, quantization, RoPE with KV write."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C, Status
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.ops import Routing
from specdec_kernels.reference import layers as reference
from support.devices import TOLERANCES, on_cuda
from support.exhaustive import covering
from support.paged import INT, assert_same_bytes, page_table, poisoned

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = DTYPES[1:]
Multiplier = tuple[torch.device, str | None]  # a device and one of its kernels of small_m_gemm


def check(got: torch.Tensor, want: torch.Tensor, factor: float = 1) -> None:
    """Check an error of a few roundings against the float64 result, relative to its scale."""
    error = (got.double().cpu() - want.double().cpu()).abs().max()
    assert error <= factor * TOLERANCES[got.dtype] * max(1.0, float(want.abs().max())), float(error)


# --- add_rms_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 7), (5, 64), (2, 4096), (1, 20000), (0, 8), (1100, 72), (1100, 5000)]
)
@pytest.mark.parametrize("add", [False, True])
def test_add_rms_norm_matches_reference(
    rows: int, width: int, add: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    out, total = sd.add_rms_norm(x, weight, 1e-5, residual=residual if add else None)
    want, want_total = reference.add_rms_norm(x, weight, 1e-5, residual if add else None)
    assert torch.equal(total, want_total)
    if rows:
        check(out, want)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_of_strided_rows_in_place_matches_reference(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(4, 200, device=device).to(dtype)
    x, residual = wide[:, :64], wide[:, 101:165]  # the second is off 16 bytes
    weight = torch.randn(64, device=device).to(dtype)
    want, want_total = reference.add_rms_norm(x, weight, 1e-6, residual)
    both = torch.full((4, 130), torch.nan, device=device).to(dtype)
    out, total = sd.add_rms_norm(x, weight, 1e-6, residual=residual, out=(both[:, 64:128], x))
    assert total is x and torch.equal(x, want_total)
    check(out, want)
    assert both[:, :64].isnan().all() and both[:, 128:].isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 136), (2, 4096), (5, 1000), (600, 264), (1, 20000), (0, 8)])
def test_add_rms_norm_quantized_equals_quantize_fp8(
    rows: int, width: int, add: bool, group_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Elements and scales equal those of quantize_fp8 over the stored rows; padding columns stay untouched."""
    x, residual = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=device).to(dtype)
    if rows:
        x[0, : width // 2] = residual[0, : width // 2] = 0
    given = residual.clone() if add else None
    groups = -(-width // 128) if group_size else 1
    numbers = torch.full((rows, width + 16), torch.nan, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((groups, rows + 4), torch.nan, device=device)
    out, total = sd.add_rms_norm(
        x, weight, 1e-5, residual=given, out=(numbers[:, :width], given), out_scales=scales[:, :rows]
    )
    normed, want_total = sd.add_rms_norm(x, weight, 1e-5, residual=residual if add else None)
    want, of_want = sd.quantize_fp8(normed, group_size=group_size)
    assert torch.equal(total, want_total) and torch.equal(scales[:, :rows], of_want)
    assert torch.equal(out.float(), want.float())
    assert numbers[:, width:].float().isnan().all() and scales[:, rows:].isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize(
    ("rows", "top_k", "width"), [(1, 8, 2048), (3, 1, 136), (5, 11, 20000), (2, 3, 7), (600, 2, 264), (0, 2, 8)]
)
def test_add_rms_norm_with_topk_weights_equals_moe_combine(
    rows: int, top_k: int, width: int, group_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """The result equals add_rms_norm over moe_combine bitwise, quantized or not."""
    made, shares = torch.randn(rows * top_k, width + 8, device=device).to(dtype)[:, :width], torch.rand(rows, top_k)
    shares, residual = shares.to(device), torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    combined = sd.moe_combine(made, shares)
    out, total = sd.add_rms_norm(made, weight, 1e-5, residual=residual, topk_weights=shares)
    want, want_total = sd.add_rms_norm(combined, weight, 1e-5, residual=residual)
    assert torch.equal(out, want) and torch.equal(total, want_total)
    if width % 8:
        return
    scales, want_scales = (torch.empty(-(-width // 128) if group_size else 1, rows, device=device) for _ in range(2))
    out, _ = sd.add_rms_norm(made, weight, 1e-5, residual=residual, topk_weights=shares, out_scales=scales)
    want, _ = sd.add_rms_norm(combined, weight, 1e-5, residual=residual, out_scales=want_scales)
    assert torch.equal(out.float(), want.float()) and torch.equal(scales, want_scales)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": None}, "topk_weights is given, expected None without residual"),
        ({"topk_weights": torch.rand(2, 4)}, "x has shape [6, 8], expected [rows * top_k=8, width]"),
        ({"topk_weights": torch.rand(3, 2)}, "residual has shape [2, 8], expected [rows=3, width=8]"),
    ],
)
def test_add_rms_norm_with_topk_weights_error_messages(changes: dict[str, torch.Tensor | None], message: str) -> None:
    arguments = {"x": torch.randn(6, 8), "residual": torch.randn(2, 8), "topk_weights": torch.rand(2, 3)}
    with pytest.raises(ValueError) as error:
        sd.add_rms_norm(weight=torch.ones(8), eps=1e-5, **arguments | changes)
    assert str(error.value) == f"add_rms_norm: {message}"


@pytest.mark.parametrize(
    ("width", "scales", "message"),
    [
        (264, torch.zeros(2, 3), "add_rms_norm: groups is 2, expected 1 or 3"),
        (264, torch.zeros(3, 4), "add_rms_norm: out_scales has shape [3, 4], expected [groups, rows=3]"),
    ],
)
def test_add_rms_norm_quantized_error_messages(width: int, scales: torch.Tensor, message: str) -> None:
    x = torch.zeros(3, width).bfloat16()
    with pytest.raises(ValueError) as error:
        sd.add_rms_norm(x, x[0], 1e-6, out_scales=scales)
    assert str(error.value) == message


def test_add_rms_norm_quantized_of_rows_off_16_bytes_runs_on_cpu_alone(device: torch.device) -> None:
    """On the CPU, weights have the alignment that their file gives them."""
    x, weight, scales = torch.randn(3, 13, device=device), torch.randn(13, device=device), torch.empty(1, 3).to(device)
    if device.type == "cuda":
        with pytest.raises(ValueError) as error:
            sd.add_rms_norm(x, weight, 1e-6, out_scales=scales)
        assert str(error.value) == "add_rms_norm: out_scales is given, expected None for rows off 16 bytes"
        return
    numbers, _ = sd.add_rms_norm(x, weight, 1e-6, out_scales=scales)
    want, of_want = sd.quantize_fp8(sd.add_rms_norm(x, weight, 1e-6)[0])
    assert torch.equal(numbers.float(), want.float()) and torch.equal(scales, of_want)


# --- rms_norm_concat


def pair_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    vocab, features = 50, rows + 2
    made = {
        "embeddings": torch.randn(vocab, width),
        "embedding_weight": torch.randn(width),
        "features": 3 * torch.randn(features, width),
        "feature_weight": torch.randn(width),
    }
    wild = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)
    tokens, feature_rows = (torch.randint(n, (rows,), dtype=torch.int32) for n in (vocab, features))
    tokens[1:3], feature_rows[2:4] = wild[: len(tokens[1:3])], wild[: len(feature_rows[2:4])]
    numbers = {"tokens": tokens.to(device), "feature_rows": feature_rows.to(device)}
    return {name: x.to(device=device, dtype=dtype) for name, x in made.items()} | numbers


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (3, 64), (2, 4096), (1, 20000), (0, 8), (640, 72)])
def test_rms_norm_concat_matches_reference(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = pair_inputs(rows, width, dtype, device)
    for feature_rows in (inputs.pop("feature_rows"), None):
        out = torch.full((rows, 2 * width + 8), torch.nan, device=device).to(dtype)
        got, kept = sd.rms_norm_concat(**inputs, feature_rows=feature_rows, eps=1e-5, out=(out[:, : 2 * width], None))
        want, features = reference.rms_norm_concat(**inputs, feature_rows=feature_rows, eps=1e-5)
        assert torch.equal(kept, features) and out[:, 2 * width :].isnan().all()
        if rows:
            check(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(4)}, "rms_norm_concat: tokens is float32, expected int32"),
        ({"features": torch.zeros(3, 8)}, "rms_norm_concat: num_features is 3, expected 4 to 2147483647"),
        ({"embeddings": torch.zeros(0, 8)}, "rms_norm_concat: vocab is 0, expected 1 to 2147483647"),
        ({"feature_weight": torch.zeros(9)}, "rms_norm_concat: feature_weight has shape [9], expected [width=8]"),
        ({"eps": 0.0}, "rms_norm_concat: eps is 0.000000, expected a finite float32 above 0"),
    ],
)
def test_rms_norm_concat_error_messages(change: dict[str, object], message: str) -> None:
    inputs = pair_inputs(4, 8, torch.float32, torch.device("cpu"))
    del inputs["feature_rows"]
    with pytest.raises(ValueError) as error:
        sd.rms_norm_concat(**(inputs | {"eps": 1e-6} | change))
    assert str(error.value) == message


# --- gated_rms_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "groups", "width"), [(1, 1, 1), (3, 2, 7), (5, 32, 128), (2, 1, 8192), (0, 4, 8), (900, 3, 72)]
)
@pytest.mark.parametrize("gates_first", [False, True])
def test_gated_rms_norm_matches_reference(
    rows: int, groups: int, width: int, gates_first: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Of rows that lie apart, in float32 and in the gate's dtype, with a weight of all groups and with one of each."""
    for x_dtype, of_all, activation in (
        (torch.float32, False, "silu"),
        (dtype, True, "sigmoid"),
        (dtype, True, "silu"),
    ):
        x = torch.randn(rows, groups, width + 3, device=device).to(x_dtype)[..., :width]
        gate = 3 * torch.randn(rows, 2 * groups * width, device=device).to(dtype)[:, groups * width :]
        gate = gate.unflatten(1, (groups, width))
        weight = torch.randn(width if of_all else groups * width, device=device).to(dtype)
        options: dict[str, Any] = {"gates_first": gates_first, "activation": activation}
        out = sd.gated_rms_norm(x, gate, weight, 1e-5, **options)
        assert out.shape == (rows, groups, width) and out.dtype == dtype
        if rows:
            check(out, reference.gated_rms_norm(x, gate, weight, 1e-5, **options))


def test_gated_rms_norm_may_write_over_its_inputs(device: torch.device) -> None:
    x, gate, weight = torch.randn(3, 2, 16, device=device), torch.randn(3, 2, 16, device=device), torch.ones(16)
    want = sd.gated_rms_norm(x, gate, weight.to(device), 1e-5)
    for out in (x.clone(), gate.clone()):
        sources = (out, gate) if torch.equal(out, x) else (x, out)
        assert torch.equal(sd.gated_rms_norm(*sources, weight.to(device), 1e-5, out=out), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5)},
         "gated_rms_norm: weight has 5 elements, expected width=4 or groups * width=8"),
        ({"activation": "relu"}, "gated_rms_norm: activation is relu, expected silu or sigmoid"),
        ({"x": torch.ones(3, 4)}, "gated_rms_norm: x has shape [3, 4], expected [rows=3, groups=2, width=4]"),
        ({"x": torch.ones(3, 2, 4).half()}, "gated_rms_norm: x is float16, expected float32"),
        ({"eps": 0.0}, "gated_rms_norm: eps is 0.000000, expected a finite float32 above 0"),
    ],
)  # fmt: skip
def test_gated_rms_norm_refuses_by_name(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(3, 2, 4),
        "gate": torch.ones(3, 2, 4),
        "weight": torch.ones(4),
        "eps": 1e-5,
    }
    with pytest.raises(ValueError) as error:
        sd.gated_rms_norm(**(given | change))
    assert str(error.value) == message


# --- silu_and_mul


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 64), (5, 1536), (0, 8)])
def test_silu_and_mul_matches_reference(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = 4 * torch.randn(rows, 2 * width, device=device).to(dtype)
    out = sd.silu_and_mul(x)
    assert out.shape == (rows, width)
    if rows:
        check(out, reference.silu_and_mul(x))


def test_silu_and_mul_of_extreme_values(device: torch.device) -> None:
    gate = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]], device=device)
    out = sd.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert out.tolist() == [[0, 0, 0, 200, pytest.approx(1e30)]]


# --- small_m_gemm


# The kernel that each size selects: [rows, out_features, in_features, bits, gated, Hopper].
LINEAR_PLANS = {
    "sm90.wgmma": [
        (1, 6144, 4096, 16, False, True),
        (6, 24576, 4096, 16, True, True),
        (64, 151936, 4096, 16, False, True),
        (65, 32768, 4096, 16, False, True),
        (96, 4096, 12288, 16, False, True),
        (128, 24576, 4096, 16, True, True),
        (128, 1, 64, 16, False, True),
        (1, 6144, 4096, 8, False, True),
        (64, 24576, 4096, 8, True, True),
        (64, 24576, 4096, 4, True, True),
    ],
    "sm80.mma": [
        (1, 6144, 4096, 16, False, False),
        (6, 24576, 4096, 16, True, False),
        (64, 151936, 4096, 16, False, False),
        (64, 16, 64, 16, True, False),
    ],
    "library": [
        (0, 6144, 4096, 16, False, True),
        (65, 6144, 4096, 16, False, False),  # more rows than the mma kernel serves, without wgmma
        (65, 32769, 4096, 16, False, True),  # a weight larger than one wave of blocks
        (128, 151936, 4096, 16, False, True),
        (129, 4096, 4096, 16, False, True),
        (384, 24576, 4096, 16, True, True),
        (2048, 4096, 12288, 16, False, True),
        (1, 6144, 4096, 32, False, True),  # float32
        (1, 6144, 4096, 8, False, False),  # FP8, which needs Hopper
        (65, 6144, 4096, 8, False, True),
        (1, 6144, 4160, 8, False, True),  # in_features is no multiple of 128
        (1, 6152, 4096, 8, False, True),
        (1, 6144, 4224, 4, False, True),  # in_features is no multiple of 256, for 4 bits
        (1, 6144, 4100, 16, False, True),  # in_features is no multiple of 64
        (1, 6152, 4096, 16, True, True),  # out_features of gates is no multiple of 8
    ],
}


@pytest.mark.parametrize("plan", LINEAR_PLANS)
def test_small_m_gemm_plan_follows_from_sizes(plan: str) -> None:
    for sizes in LINEAR_PLANS[plan]:
        assert _C.small_m_gemm_plan_of_sizes(*sizes) == plan, sizes


def test_small_m_gemm_plans_are_all_selected_by_some_size() -> None:
    sizes = itertools.product((1, 64, 100, 300), (64, 40000), (64,), (4, 8, 16, 32), (True, False), (True, False))
    assert {_C.small_m_gemm_plan_of_sizes(*each) for each in sizes} == set(LINEAR_PLANS)


def test_small_m_gemm_plan_on_cpu_is_library() -> None:
    assert _C.small_m_gemm_plan(torch.zeros(1, 64).bfloat16(), torch.zeros(16, 64).bfloat16(), False) == "library"


@pytest.fixture(params=["cpu", *on_cuda("cuda sm80.mma", "cuda sm90.wgmma")])
def multiplier(request: pytest.FixtureRequest) -> Multiplier:
    device, *plan = request.param.split(" ")
    if plan == ["sm90.wgmma"] and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU here")
    return torch.device(device), plan[0] if plan else None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 33, 64, 90, 128])
@pytest.mark.parametrize(("width", "outs"), [(64, 1), (320, 17), (1088, 48), (512, 5000), (192, 40000)])
def test_small_m_gemm_matches_reference(
    rows: int, width: int, outs: int, dtype: torch.dtype, multiplier: Multiplier
) -> None:
    device, plan = multiplier
    outs = min(outs, 512) if device.type == "cpu" else outs
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(outs, width, device=device).to(dtype)
    for bias in (None, torch.randn(outs, device=device).to(dtype)):
        out = torch.full((rows, outs + 8), torch.nan, device=device).to(dtype)
        sd.small_m_gemm(x, weight, bias, out=out[:, :outs], plan=plan)
        assert out[:, outs:].isnan().all()
        if rows:
            check(out[:, :outs], reference.small_m_gemm(x, weight, bias))
        unrounded = torch.full((rows, outs + 8), torch.nan, device=device)
        sd.small_m_gemm(x, weight, bias, out=unrounded[:, :outs], plan=plan)
        assert unrounded[:, outs:].isnan().all() and torch.equal(unrounded.to(dtype)[:, :outs], out[:, :outs])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [0, 2, 14, 32, 64, 70, 128])
@pytest.mark.parametrize(("width", "outs"), [(64, 8), (1152, 40), (512, 2504), (192, 20000)])
def test_small_m_gemm_gated_matches_reference(
    rows: int, width: int, outs: int, dtype: torch.dtype, multiplier: Multiplier
) -> None:
    device, plan = multiplier
    outs = min(outs, 512) if device.type == "cpu" else outs
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(2 * outs, width, device=device) * width**-0.5).to(dtype)
    for bias in (None, torch.randn(2 * outs, device=device).to(dtype)):
        out = torch.full((rows, outs + 8), torch.nan, device=device).to(dtype)
        sd.small_m_gemm(x, weight, bias, gated=True, out=out[:, :outs], plan=plan)
        assert out[:, outs:].isnan().all()
        if rows:
            check(out[:, :outs], reference.small_m_gemm(x, weight, bias, gated=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
def test_small_m_gemm_of_strided_rows_matches_reference(gated: bool, multiplier: Multiplier) -> None:
    device, plan = multiplier
    for rows, width, outs in ((15, 64, 32), (200, 256, 96), (300, 512, 96), (600, 512, 128)):
        x, weight = (torch.randn(n, width + 96, device=device).bfloat16() for n in (rows, 2 * outs))
        x, weight = x[::2, 32 : 32 + width], weight[::2, 64 : 64 + width]
        check(sd.small_m_gemm(x, weight, gated=gated, plan=plan), reference.small_m_gemm(x, weight, gated=gated))


@pytest.mark.parametrize(("outs", "gated"), covering([3008, 20000], [False, True]))
def test_small_m_gemm_rows_do_not_depend_on_batch(outs: int, gated: bool, multiplier: Multiplier) -> None:
    device, plan = multiplier
    outs = min(outs, 3008) if device.type == "cpu" else outs
    x, weight = (torch.randn(n, 512, device=device).bfloat16() for n in (200, outs))
    whole = torch.cat([sd.small_m_gemm(part, weight, gated=gated, plan=plan) for part in x.split(40)])
    for first, last in ((0, 1), (3, 5), (2, 8), (7, 23), (40, 80), (30, 110), (70, 198)):
        assert torch.equal(sd.small_m_gemm(x[first:last], weight, gated=gated, plan=plan), whole[first:last])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "outs"), [(129, 64, 8), (300, 320, 48), (130, 512, 20000), (384, 64, 12288), (500, 192, 2504)]
)
def test_small_m_gemm_of_many_rows_matches_reference(
    rows: int, width: int, outs: int, gated: bool, dtype: torch.dtype, multiplier: Multiplier
) -> None:
    device, plan = multiplier
    outs = min(outs, 48) if device.type == "cpu" else outs
    outs, all_outs = (outs, 2 * outs) if gated else (outs - 3, outs - 3)
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(all_outs, width, device=device) * width**-0.5).to(dtype)
    for bias in (None, torch.randn(all_outs, device=device).to(dtype)):
        want = reference.small_m_gemm(x, weight, bias, gated=gated)
        for start in (0, 8 if bias is None else 1):  # the last off 16 bytes
            out = torch.full((rows, outs + 16), torch.nan, device=device).to(dtype)
            sd.small_m_gemm(x, weight, bias, gated=gated, out=out[:, start : start + outs], plan=plan)
            assert out[:, :start].isnan().all() and out[:, start + outs :].isnan().all()
            check(out[:, start : start + outs], want)


@pytest.mark.parametrize("gated", [False, True])
def test_small_m_gemm_of_many_rows_does_not_depend_on_row_count(gated: bool, multiplier: Multiplier) -> None:
    device, plan = multiplier
    x, weight = (torch.randn(n, 320, device=device).bfloat16() for n in (700, 24576 if device.type == "cuda" else 64))
    whole = sd.small_m_gemm(x, weight, gated=gated, plan=plan)
    for first, last in ((0, 129), (3, 195), (100, 484), (128, 640), (1, 700)):
        assert torch.equal(sd.small_m_gemm(x[first:last], weight, gated=gated, plan=plan), whole[first:last])


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 320])  # small_m_gemm computes the gate itself up to 128 rows
def test_linear_swiglu_matches_reference_on_every_kernel(rows: int, device: torch.device) -> None:
    outs = 12288 if device.type == "cuda" else 8
    x, weight = torch.randn(rows, 128, device=device).bfloat16(), torch.randn(2 * outs, 128, device=device).bfloat16()
    got = Linear(weight * 128**-0.5, None).swiglu(x)
    check(got, reference.small_m_gemm(x, weight * 128**-0.5, gated=True), factor=2)


@pytest.mark.parametrize(
    ("shape", "weight", "gated", "message"),
    [
        ((262145, 64), (4, 64), False, "small_m_gemm: rows is 262145, expected 0 to 262144"),
        ((2, 96), (4, 96), False, "small_m_gemm: in_features is 96, expected a multiple of 64"),
        ((2, 64), (4, 128), False, "small_m_gemm: weight has shape [4, 128], expected [out_features, in_features=64]"),
        ((2, 64), (24, 64), True, "small_m_gemm: 2 * out_features is 24, expected a multiple of 16"),
    ],
)
def test_small_m_gemm_error_messages(
    shape: tuple[int, int], weight: tuple[int, int], gated: bool, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        sd.small_m_gemm(torch.zeros(shape).bfloat16(), torch.zeros(weight).bfloat16(), gated=gated)
    assert str(error.value) == message


def test_small_m_gemm_refuses_unknown_plan(device: torch.device) -> None:
    x, weight = torch.zeros(2, 64, device=device).bfloat16(), torch.zeros(4, 64, device=device).bfloat16()
    with pytest.raises(ValueError) as error:
        sd.small_m_gemm(x, weight, plan="sm70.mma")
    assert str(error.value).startswith("small_m_gemm: plan is sm70.mma, expected ")
    assert str(error.value).endswith("None on cpu" if device.type == "cpu" else "sm80.mma or sm90.wgmma")


@pytest.mark.parametrize("name", ["x", "weight"])
def test_small_m_gemm_refuses_rows_off_16_bytes(name: str) -> None:
    tensors = {"x": torch.zeros(2, 64).bfloat16(), "weight": torch.zeros(4, 64).bfloat16()}
    tensors[name] = torch.zeros(2, 72).bfloat16()[:, 1:65]
    with pytest.raises(ValueError) as error:
        sd.small_m_gemm(**tensors)
    assert str(error.value) == (f"small_m_gemm: {name} has rows off 16 bytes, expected rows that start on 16 bytes")


# --- small_m_gemm of 8 bits, and quantize_fp8


EIGHTS = ["cpu", *on_cuda("cuda")]


@pytest.fixture(params=EIGHTS)
def hopper(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU here")
    return torch.device(request.param)


def fp8_rows(rows: int, width: int, group_size: int | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 rows with scales, whose magnitude varies between rows and between groups."""
    x = torch.randn(rows, width, device=device) * torch.rand(rows, 1, device=device)
    grown = x.unflatten(1, (-1, 128)) * torch.rand(rows, width // 128, 1, device=device)
    return sd.quantize_fp8(grown.flatten(1), group_size=group_size)


def check_fp8(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check with the tolerance of tensor cores, which keep about 14 bits of the sum of 128 products."""
    assert got.isfinite().all()
    assert (got.double() - want).norm() <= (2e-2 if got.dtype == torch.bfloat16 else 1e-2) / 4 * want.norm()


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 17, 33, 64, 70, 130])
@pytest.mark.parametrize(("width", "outs"), [(128, 16), (384, 48), (1024, 1056), (2048, 5008), (512, 20000)])
def test_small_m_gemm_of_fp8_matches_reference(
    rows: int, width: int, outs: int, group_size: int | None, gated: bool, hopper: torch.device
) -> None:
    if hopper.type == "cpu":
        rows, outs, width = min(rows, 9), 16, min(width, 384)
    x, weight = fp8_rows(rows, width, group_size, hopper), fp8_rows(2 * outs, width, group_size, hopper)
    made = outs if gated else 2 * outs
    for dtype, bias in ((torch.bfloat16, None), (torch.float16, torch.randn(2 * outs, device=hopper).half())):
        out = torch.full((rows, made + 8), torch.nan, dtype=dtype, device=hopper)
        scales = {"x_scales": x[1], "weight_scales": weight[1]}
        sd.small_m_gemm(x[0], weight[0], bias, **scales, gated=gated, out=out[:, :made])
        assert out[:, made:].isnan().all()
        if rows:
            check_fp8(out[:, :made], reference.small_m_gemm(x[0], weight[0], bias, **scales, gated=gated))


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("outs", [3008, 20000])
def test_small_m_gemm_of_fp8_rows_do_not_depend_on_batch(
    outs: int, group_size: int | None, hopper: torch.device
) -> None:
    outs = 16 if hopper.type == "cpu" else outs
    x, x_scales = fp8_rows(60, 512, group_size, hopper)
    weight, of_weight = fp8_rows(outs, 512, group_size, hopper)
    whole = sd.small_m_gemm(x, weight, x_scales=x_scales, weight_scales=of_weight)
    for first, last in ((0, 1), (4, 9), (8, 24), (12, 44)):
        part = sd.small_m_gemm(x[first:last], weight, x_scales=x_scales[:, first:last], weight_scales=of_weight)
        assert torch.equal(part, whole[first:last])


def int4_weight(rows: int, width: int, groups: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a packed INT4 weight and its scales: a byte holds two elements, a scale's low four bits its zero point."""
    weight = torch.randint(256, (rows, width // 2), dtype=torch.uint8, device=device)
    bits = (torch.rand(groups, rows, device=device) + 0.5).view(torch.int32)
    scales = (bits & ~15 | torch.randint(16, bits.shape, dtype=torch.int32, device=device)).view(torch.float32)
    return {"weight": weight, "weight_scales": scales}


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 17, 32, 33, 70])
@pytest.mark.parametrize(("width", "outs"), [(256, 16), (768, 48), (1024, 1056), (2048, 5008), (512, 20000)])
def test_small_m_gemm_of_int4_matches_reference(
    rows: int, width: int, outs: int, by_groups: bool, gated: bool, hopper: torch.device
) -> None:
    if hopper.type == "cpu":
        rows, outs, width = min(rows, 9), 16, min(width, 768)
    weight = int4_weight(2 * outs, width, width // 128 if by_groups else 1, hopper)
    made = outs if gated else 2 * outs
    for dtype in HALVES:
        x = (torch.randn(rows, width, device=hopper) * (width**-0.5 / 5 if gated else 1)).to(dtype)
        for bias in (None, torch.randn(2 * outs, device=hopper).to(dtype)):
            out = torch.full((rows, made + 8), torch.nan, dtype=dtype, device=hopper)
            sd.small_m_gemm(x, bias=bias, **weight, gated=gated, out=out[:, :made])
            assert out[:, made:].isnan().all()
            if rows:
                check(out[:, :made], reference.small_m_gemm(x, bias=bias, **weight, gated=gated))


@pytest.mark.parametrize("outs", [3008, 20000])
def test_small_m_gemm_of_int4_rows_do_not_depend_on_batch(outs: int, hopper: torch.device) -> None:
    outs = 16 if hopper.type == "cpu" else outs
    x, weight = torch.randn(60, 512, device=hopper).bfloat16(), int4_weight(outs, 512, 4, hopper)
    whole = sd.small_m_gemm(x, **weight)
    for first, last in ((0, 1), (4, 9), (8, 24), (12, 44)):
        assert torch.equal(sd.small_m_gemm(x[first:last], **weight), whole[first:last])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(16, 256, dtype=torch.uint8)}, "weight has shape [16, 256], expected [out_features, in_features / 2=128]"),
        ({"weight": torch.zeros(16, 256).bfloat16()}, "weight is bfloat16, expected uint8"),
        ({"x": torch.zeros(2, 128).bfloat16()}, "in_features is 128, expected a multiple of 256"),
        ({"weight_scales": torch.ones(4, 16)}, "groups is 4, expected 1 or 2"),
        ({"x": torch.zeros(2, 256)}, "x is float32, expected float16 or bfloat16"),
    ],
)  # fmt: skip
def test_small_m_gemm_of_int4_error_messages(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 256).bfloat16()} | int4_weight(16, 256, 2, torch.device("cpu")) | changes
    with pytest.raises(ValueError) as error:
        sd.small_m_gemm(**arguments)
    assert str(error.value) == f"small_m_gemm: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scales": None}, "weight_scales is None, expected a tensor with x_scales"),
        ({"x_scales": None}, "x is float8_e4m3fn, expected float16 or bfloat16"),
        ({"x": torch.zeros(2, 256).bfloat16()}, "x is bfloat16, expected float8_e4m3fn"),
        ({"weight_scales": torch.ones(2, 16)}, "weight_scales has shape [2, 16], expected [groups=1, out_features=16]"),
        ({"x_scales": torch.ones(3, 4)[:, :2], "weight_scales": torch.ones(3, 16)}, "groups is 3, expected 1 or 2"),
        (
            {"x_scales": torch.ones(2, 2), "weight_scales": torch.ones(2, 16)},
            "x_scales has groups off 16 bytes, expected groups that start on 16 bytes",
        ),
        ({"x": torch.zeros(2, 192).to(torch.float8_e4m3fn)}, "in_features is 192, expected a multiple of 128"),
        ({"weight": torch.zeros(8, 256).to(torch.float8_e4m3fn)}, "out_features is 8, expected a multiple of 16"),
        ({"out": torch.zeros(2, 16)}, "out is float32, expected float16 or bfloat16"),
    ],
)
def test_small_m_gemm_of_fp8_error_messages(changes: dict[str, torch.Tensor], message: str) -> None:
    x, weight = (torch.zeros(n, 256).to(torch.float8_e4m3fn) for n in (2, 16))
    scales = {"x_scales": torch.ones(1, 2), "weight_scales": torch.ones(1, 16)}
    arguments = {"x": x, "weight": weight} | scales | changes
    with pytest.raises(ValueError) as error:
        sd.small_m_gemm(**arguments)
    assert str(error.value) == f"small_m_gemm: {message}"


# --- moe_grouped_gemm


class Experts(NamedTuple):
    """Arguments of moe_grouped_gemm, and the experts that each row selects."""

    arguments: dict[str, torch.Tensor]
    experts: torch.Tensor  # [T, top_k]


def experts_of(
    rows: int, top_k: int, experts: int, width: int, outs: int, scaled: str, device: torch.device
) -> Experts:
    """Return rows that select experts at random, never the first two, whose weights and scales are poisoned.

    Weights have 16 bits if `scaled` is "halves".
    """
    chosen = 2 + torch.rand(rows, experts - 2).topk(top_k).indices
    flat, order = chosen.flatten().sort()
    arguments = {
        "sorted_pairs": order,
        "expert_ends": torch.searchsorted(flat, torch.arange(experts), right=True, out_int32=True),
    }
    if scaled == "halves":
        arguments["x"] = torch.randn(rows, width).bfloat16()
        arguments["weight"] = (torch.randn(experts, outs, width) / width**0.5).bfloat16()
        arguments["weight"][:2] = torch.nan
        return Experts({name: tensor.to(device) for name, tensor in arguments.items()}, chosen)
    group_size = 128 if scaled == "groups" else None
    weight, weight_scales = fp8_rows(experts * outs, width, group_size, torch.device("cpu"))
    numbers = weight.view(experts, outs, width)
    scales = weight_scales.t().view(experts, outs, -1).mT.contiguous()
    numbers[:2], scales[:2] = torch.full_like(numbers[:2].float(), torch.nan).to(numbers.dtype), torch.nan
    arguments |= {"weight": numbers, "weight_scales": scales}
    if scaled == "none":
        arguments["x"] = torch.randn(rows, width).bfloat16()
    else:
        arguments["x"], arguments["x_scales"] = fp8_rows(rows, width, group_size, torch.device("cpu"))
    return Experts({name: tensor.to(device) for name, tensor in arguments.items()}, chosen)


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scaled", ["groups", "rows", "none"])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "width", "outs"),
    [(1, 2, 5, 128, 16), (3, 4, 9, 768, 48), (8, 8, 20, 256, 32), (40, 2, 4, 640, 32), (70, 3, 130, 128, 16)],
)
def test_moe_grouped_gemm_of_fp8_matches_reference(
    rows: int, top_k: int, experts: int, width: int, outs: int, scaled: str, gated: bool, device: torch.device
) -> None:
    """Reading an expert that no row selects, or another row's input, would give NaN."""
    given, _ = experts_of(rows, top_k, experts, width, outs, scaled, device)
    made = outs // 2 if gated else outs
    for dtype in (torch.bfloat16, torch.float16):
        if scaled == "none":
            given["x"] = given["x"].to(dtype)
        wide = torch.full((rows * top_k, made + 8), torch.nan, dtype=dtype, device=device)
        sd.moe_grouped_gemm(**given, gated=gated, out=wide[:, :made])
        assert wide[:, made:].isnan().all()
        check_fp8(
            wide[:, :made].cpu(), reference.moe_grouped_gemm(**{k: t.cpu() for k, t in given.items()}, gated=gated)
        )


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "width", "outs"),
    [
        (1, 2, 5, 64, 16),
        (1, 8, 30, 2048, 96),
        (3, 4, 9, 768, 48),
        (8, 8, 20, 320, 32),
        (9, 1, 3, 192, 32),
        (40, 2, 4, 640, 32),
        (70, 3, 130, 128, 16),
        (33, 2, 600, 64, 16),
        (300, 2, 7, 64, 48),
    ],
)
def test_moe_grouped_gemm_of_16_bit_dtypes_matches_reference(
    rows: int, top_k: int, experts: int, width: int, outs: int, gated: bool, device: torch.device
) -> None:
    """Unselected experts are poisoned as above; in the case of 9 rows, all select one expert."""
    given, _ = experts_of(rows, top_k, experts, width, outs, "halves", device)
    made = outs // 2 if gated else outs
    for dtype in HALVES:
        given |= {name: given[name].to(dtype) for name in ("x", "weight")}
        wide = torch.full((rows * top_k, made + 8), torch.nan, dtype=dtype, device=device)
        sd.moe_grouped_gemm(**given, gated=gated, out=wide[:, :made])
        assert wide[:, made:].isnan().all()
        check(wide[:, :made], reference.moe_grouped_gemm(**{k: t.cpu() for k, t in given.items()}, gated=gated))
        assert torch.equal(sd.moe_grouped_gemm(**given, gated=gated, routing_ready=True), wide[:, :made])


@pytest.mark.sanitize
def test_moe_grouped_gemm_of_strided_rows_of_pairs_matches_reference(device: torch.device) -> None:
    """Columns next to the rows are NaN; each (row, expert) pair has an input row of its own."""
    given, _ = experts_of(7, 3, 6, 192, 32, "halves", device)
    wide = torch.full((21, 320), torch.nan, device=device).bfloat16()
    given["x"] = wide[:, 64:256].copy_(torch.randn(21, 192))
    check(sd.moe_grouped_gemm(**given), reference.moe_grouped_gemm(**{k: t.cpu() for k, t in given.items()}))


def test_moe_grouped_gemm_of_an_expert_that_every_row_selects_matches_reference(device: torch.device) -> None:
    """It has far more rows than experts have on average."""
    given, chosen = experts_of(30, 2, 64, 192, 32, "halves", device)
    chosen[:, 0], chosen[:, 1] = 37, 36 + 2 * (torch.arange(30) % 2)
    flat, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(64), right=True, out_int32=True)
    given |= {"sorted_pairs": order.to(device), "expert_ends": ends.to(device)}
    check(sd.moe_grouped_gemm(**given), reference.moe_grouped_gemm(**{k: t.cpu() for k, t in given.items()}))


@pytest.mark.parametrize("scaled", ["groups", "halves"])
def test_moe_grouped_gemm_rows_do_not_depend_on_batch(scaled: str, device: torch.device) -> None:
    """A row has the same bits alone, in a small batch and in a large one."""
    given, chosen = experts_of(70, 3, 9, 512, 32, scaled, device)
    whole = sd.moe_grouped_gemm(**given).view(70, 3, -1)
    for first, last in ((0, 1), (5, 12), (3, 33)):
        flat, order = chosen[first:last].flatten().sort()
        part = {
            "x": given["x"][first:last],
            "sorted_pairs": order.to(device),
            "expert_ends": torch.searchsorted(flat, torch.arange(9), right=True, out_int32=True).to(device),
        }
        if scaled == "groups":
            part["x_scales"] = given["x_scales"][:, first:last]
        assert torch.equal(sd.moe_grouped_gemm(**(given | part)).view(last - first, 3, -1), whole[first:last])


@pytest.mark.parametrize("scaled", ["none", "halves"])
def test_moe_grouped_gemm_of_invalid_order_stays_in_bounds(scaled: str, device: torch.device) -> None:
    """A pair out of range reads the nearest row; an expert whose end precedes its begin is empty."""
    given, _ = experts_of(2, 2, 4, 128, 16, scaled, device)
    given["sorted_pairs"] = torch.tensor([-7, 1, 900, 2], device=device)
    given["expert_ends"] = torch.tensor([-3, -5, 2, 1000], dtype=torch.int32, device=device)
    out = torch.full((4, 16), torch.nan, device=device).bfloat16()
    sd.moe_grouped_gemm(**given, out=out)
    assert out.isfinite().all()
    given["expert_ends"] = torch.tensor([0, 0, 4, 1], dtype=torch.int32, device=device)
    assert sd.moe_grouped_gemm(**given).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 64).bfloat16()}, "in_features is 64, expected 128 to 2147483647"),
        ({"x": torch.zeros(2, 192).bfloat16()}, "in_features is 192, expected a multiple of 128"),
        ({"weight": torch.zeros(3, 24, 256)}, "weight is float32, expected float8_e4m3fn"),
        (
            {"weight": torch.zeros(3, 24, 256).to(torch.float8_e4m3fn)},
            "out_features is 24, expected a multiple of 16",
        ),
        ({"sorted_pairs": torch.zeros(5, dtype=torch.int64)}, "pairs is 5, expected a multiple of 2"),
        ({"sorted_pairs": torch.zeros(4, dtype=torch.int32)}, "sorted_pairs is int32, expected int64"),
        ({"expert_ends": torch.zeros(4, dtype=torch.int32)}, "expert_ends has shape [4], expected [experts=3]"),
        ({"weight_scales": torch.ones(3, 3, 32)}, "groups is 3, expected 1 or 2"),
        ({"x_scales": torch.ones(1, 2)}, "x is bfloat16, expected float8_e4m3fn"),
        ({"weight_scales": None}, "weight is float8_e4m3fn, expected bfloat16"),
        (
            {"weight_scales": None, "x_scales": torch.ones(1, 2)},
            "weight_scales is None, expected a tensor with x_scales",
        ),
        ({"weight_scales": None, "x": torch.zeros(2, 32).half()}, "in_features is 32, expected 64 to 2147483647"),
        ({"weight_scales": None, "x": torch.zeros(2, 96).half()}, "in_features is 96, expected a multiple of 64"),
        (
            {"weight_scales": None, "weight": torch.zeros(3, 24, 256).bfloat16()},
            "out_features is 24, expected a multiple of 16",
        ),
    ],
)
def test_moe_grouped_gemm_error_messages(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "x": torch.zeros(2, 256).bfloat16(),
        "weight": torch.zeros(3, 32, 256).to(torch.float8_e4m3fn),
        "sorted_pairs": torch.zeros(4, dtype=torch.int64),
        "expert_ends": torch.zeros(3, dtype=torch.int32),
        "weight_scales": torch.ones(3, 1, 32),
    } | changes
    with pytest.raises(ValueError) as error:
        sd.moe_grouped_gemm(**arguments)
    assert str(error.value) == f"moe_grouped_gemm: {message}"


# --- moe_route


def check_routing(got: Routing, want: Routing) -> None:
    """Compare a routing with that of the reference."""
    for name in ("topk_ids", "sorted_pairs", "expert_ends"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    assert torch.equal(got.topk_weights.isnan().cpu(), want.topk_weights.isnan())
    if want.topk_weights.numel():
        check(got.topk_weights.nan_to_num(), want.topk_weights.nan_to_num())


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [
        (0, 4, 2),
        (1, 1, 1),
        (1, 128, 8),
        (3, 7, 7),
        (17, 60, 4),
        (64, 256, 32),
        (64, 33, 3),
        (65, 128, 8),
        (30, 300, 5),
        (64, 512, 10),
        (5, 513, 10),
        (0, 1024, 2),
        (700, 1024, 9),
        (2500, 64, 6),
    ],
)
def test_moe_route_matches_reference(
    rows: int, experts: int, top_k: int, renormalize: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Many scores tie."""
    wide = torch.full((rows, experts + 3), torch.nan).to(dtype)
    wide[:, :experts] = (torch.randn(rows, experts) * 3).round() / 2
    got = sd.moe_route(wide.to(device)[:, :experts], top_k, renormalize=renormalize)
    want = reference.moe_route(wide[:, :experts], top_k, renormalize=renormalize)
    check_routing(got, want)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("renormalize", [False, True])
def test_moe_route_of_special_scores(renormalize: bool, rows: int, device: torch.device) -> None:
    """NaN counts as -inf, infinities share the weight, and rows without a finite score select the first experts."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor(
        [[nan, 1, -inf, 2, nan], [inf, 5, inf, nan, -inf], [nan] * 5, [-inf] * 5, [-0.0, 0, 0, -0.0, 0]]
    )
    got = sd.moe_route(scores.repeat(rows, 1).to(device), 3, renormalize=renormalize)
    want = reference.moe_route(scores, 3, renormalize=renormalize)
    assert want.topk_ids.tolist() == [[3, 1, 0], [0, 2, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert torch.equal(got.topk_ids.cpu(), want.topk_ids.repeat(rows, 1))
    check(got.topk_weights, want.topk_weights.repeat(rows, 1))


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{}, {"renormalize": True, "scale": 2.5}], ids=["sigmoids", "renormalized"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 64, 4), (3, 7, 7), (64, 256, 8), (65, 128, 8), (0, 5, 2), (30, 300, 5)]
)
def test_moe_route_by_sigmoids_matches_reference(
    rows: int, experts: int, top_k: int, biased: bool, options: dict[str, Any], device: torch.device
) -> None:
    """Many scores tie, and equal scores have equal sigmoids on every device."""
    scores = ((torch.randn(rows, experts) * 3).round() / 2).to(torch.bfloat16 if rows % 2 else torch.float32)
    bias = torch.randint(-8, 8, (experts,)) / 37 if biased else None
    options = options | {"activation": "sigmoid"}
    got = sd.moe_route(scores.to(device), top_k, bias=None if bias is None else bias.to(device), **options)
    want = reference.moe_route(scores, top_k, bias=bias, **options)
    check_routing(got, want)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "n_group", "topk_group"),
    [
        (3, 256, 8, 8, 4),
        (64, 160, 6, 8, 3),
        (70, 512, 10, 32, 5),
        (5, 60, 4, 15, 1),
        (1, 8, 8, 4, 4),
        (2, 1024, 32, 2, 1),
    ],
)
def test_moe_route_selects_from_the_best_groups(
    rows: int, experts: int, top_k: int, n_group: int, topk_group: int, activation: str, device: torch.device
) -> None:
    """Many scores and groups tie; some scores are NaN. Sums of the sigmoids and biases are exact."""
    scores = (torch.randn(rows, experts) * 3).round() / 2
    options: dict[str, Any] = {"activation": activation, "n_group": n_group, "topk_group": topk_group, "scale": 1.5}
    if activation == "sigmoid":
        scores = scores.sign() * 200
        bias = torch.randint(1, 9, (experts,)) / 8
        options |= {"bias": bias.to(device), "renormalize": True, "eps": 1e-6}
    scores[torch.rand(rows, experts) < 0.05] = torch.nan
    got = sd.moe_route(scores.to(device), top_k, **options)
    want = reference.moe_route(scores, top_k, **(options | ({"bias": bias} if activation == "sigmoid" else {})))
    check_routing(got, want)


@pytest.mark.parametrize("rows", [1, 70])
def test_moe_route_by_sigmoids_of_special_scores(rows: int, device: torch.device) -> None:
    """NaN is selected last and weighs nothing."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan, 1, -inf, 2, nan], [inf, 5, inf, nan, -inf], [nan] * 5])
    got = sd.moe_route(scores.repeat(rows, 1).to(device), 4, activation="sigmoid", renormalize=True)
    want = reference.moe_route(scores, 4, activation="sigmoid", renormalize=True)
    assert want.topk_ids.tolist() == [[3, 1, 2, 0], [0, 2, 1, 4], [0, 1, 2, 3]]
    assert torch.equal(got.topk_ids.cpu(), want.topk_ids.repeat(rows, 1))
    check(got.topk_weights, want.topk_weights.repeat(rows, 1))


def test_moe_route_rows_do_not_depend_on_batch(device: torch.device) -> None:
    scores = torch.randn(200, 100, device=device)
    whole = sd.moe_route(scores, 6)
    for first, last in ((0, 1), (50, 90), (3, 130)):
        part = sd.moe_route(scores[first:last], 6)
        assert torch.equal(part.topk_ids, whole.topk_ids[first:last])
        assert torch.equal(part.topk_weights, whole.topk_weights[first:last])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(2, 8, dtype=torch.int32)}, "scores is int32, expected float32 or float16 or bfloat16"),
        ({"scores": torch.zeros(2, 1025)}, "experts is 1025, expected 1 to 1024"),
        ({"top_k": 9}, "top_k is 9, expected 1 to 8"),
        ({"top_k": 33, "scores": torch.zeros(2, 64)}, "top_k is 33, expected 1 to 32"),
        ({"scores": torch.zeros(70000, 8)}, "pairs is 280000, expected 0 to 262144"),
        ({"activation": "silu"}, "activation is silu, expected softmax or sigmoid"),
        ({"bias": torch.zeros(8)}, "bias is given, expected none with softmax"),
        ({"scale": 0.0}, "scale is 0.000000, expected a finite float32 above 0"),
        ({"eps": -1.0}, "eps is -1.000000, expected 0 to 1"),
        ({"n_group": 33}, "n_group is 33, expected 1 to 32"),
        ({"n_group": 3}, "n_group is 3, expected a divisor of 8 experts that leaves each group 2 or more"),
        ({"n_group": 8}, "n_group is 8, expected a divisor of 8 experts that leaves each group 2 or more"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5, expected 1 to 4"),
        ({"n_group": 4, "topk_group": 1}, "top_k is 4, expected at most 2, as many experts as topk_group=1 has"),
        ({"activation": "sigmoid", "bias": torch.zeros(7)}, "bias has shape [7], expected [experts=8]"),
    ],
)
def test_moe_route_error_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.moe_route(**({"scores": torch.zeros(2, 8), "top_k": 4} | changes))
    assert str(error.value) == f"moe_route: {message}"


# --- shared experts of moe_grouped_gemm and moe_route


def shared_of(
    rows: int, top_k: int, experts: int, num_shared: int, width: int, outs: int, gated: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return rows that select experts as `experts_of` has them, and all of them the shared ones.

    Next to the rows of the shared weight there are NaN.
    """
    given, chosen = experts_of(rows, top_k, experts, width, outs, "halves", torch.device("cpu"))
    shared_ids = experts + torch.arange(num_shared).expand(rows, -1)
    flat, given["sorted_pairs"] = torch.cat([chosen, shared_ids], 1).flatten().sort(stable=True)
    all_experts = torch.arange(experts + num_shared)
    given["expert_ends"] = torch.searchsorted(flat, all_experts, right=True, out_int32=True)
    shape = (num_shared * outs, width) if gated else (outs, num_shared * width)
    wide = torch.full((shape[0], shape[1] + 16), torch.nan).bfloat16()
    wide[:, 8:-8] = torch.randn(shape) / width**0.5
    given = {name: tensor.to(device) for name, tensor in given.items()}
    return given | {"shared_weight": wide.to(device)[:, 8:-8]}


@pytest.mark.sanitize
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "num_shared", "width", "outs"),
    [
        (1, 2, 5, 1, 64, 16),
        (1, 4, 64, 1, 2048, 96),
        (2, 6, 30, 2, 320, 1408),
        (3, 4, 9, 3, 768, 48),
        (8, 8, 20, 2, 320, 32),
        (9, 1, 3, 1, 192, 32),
        (32, 4, 64, 2, 128, 32),
        (40, 2, 4, 3, 640, 32),
        (33, 2, 600, 1, 64, 16),
        (300, 2, 7, 2, 64, 48),
    ],
)
def test_moe_grouped_gemm_of_shared_experts_matches_reference(
    rows: int, top_k: int, experts: int, num_shared: int, width: int, outs: int, gated: bool, device: torch.device
) -> None:
    """Columns next to a shared expert's, another expert's and those that no row selects would give NaN or a large error."""
    given = shared_of(rows, top_k, experts, num_shared, width, outs, gated, device)
    made = outs // 2 if gated else outs
    for dtype in HALVES:
        whole = given["shared_weight"]
        given |= {name: given[name].to(dtype) for name in ("x", "weight")}
        strided = torch.full((len(whole), whole.shape[1] + 16), torch.nan, dtype=dtype, device=device)
        given["shared_weight"] = strided[:, 8:-8].copy_(whole)
        want = reference.moe_grouped_gemm(**{k: t.cpu() for k, t in given.items()}, gated=gated)
        wide = torch.full((rows * (top_k + num_shared), made + 8), torch.nan, dtype=dtype, device=device)
        sd.moe_grouped_gemm(**given, gated=gated, out=wide[:, :made])
        assert wide[:, made:].isnan().all()
        check(wide[:, :made], want)
        given["shared_weight"] = whole.to(dtype).contiguous()
        assert torch.equal(sd.moe_grouped_gemm(**given, gated=gated, routing_ready=True), wide[:, :made])


@pytest.mark.parametrize("gated", [False, True])
def test_moe_grouped_gemm_of_shared_experts_equals_routed_ones(gated: bool, device: torch.device) -> None:
    """The same weights as routed experts give the same bits, and rows do not depend on the batch."""
    given = shared_of(20, 3, 12, 2, 512, 64, gated, device)
    parts = reference.split_shared_weight(given["shared_weight"], 2, gated)
    weight = torch.cat([given["weight"], torch.stack(parts)])
    got = sd.moe_grouped_gemm(**given, gated=gated)
    assert torch.equal(
        got, sd.moe_grouped_gemm(given["x"], weight, given["sorted_pairs"], given["expert_ends"], gated=gated)
    )
    ends = torch.tensor([0] * 12 + [1, 2], dtype=torch.int32, device=device)
    alone = {"x": given["x"][7:8], "sorted_pairs": torch.arange(2, device=device), "expert_ends": ends}
    assert torch.equal(sd.moe_grouped_gemm(**(given | alone), gated=gated), got.view(20, 5, -1)[7, 3:])


@pytest.mark.parametrize("gated", [False, True])
def test_moe_grouped_gemm_of_shared_experts_alone_matches_reference(gated: bool, device: torch.device) -> None:
    """The sum of the parts' products is the MLP's."""
    given = shared_of(5, 3, 12, 3, 128, 64, gated, device)
    pairs = torch.arange(15, device=device).view(5, 3).t().flatten()
    ends = torch.tensor([0] * 12 + [5, 10, 15], dtype=torch.int32, device=device)
    x = torch.randn(5 if gated else 15, 128, device=device).bfloat16()
    given |= {"x": x, "sorted_pairs": pairs, "expert_ends": ends}
    got = sd.moe_grouped_gemm(**given, gated=gated).view(5, 3, -1)
    if gated:
        check(got.flatten(1), reference.silu_and_mul(x.double() @ given["shared_weight"].double().T))
    else:
        check(got.float().sum(1).to(x.dtype), x.view(5, -1).double() @ given["shared_weight"].double().T, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_weight": torch.zeros(40, 128).bfloat16()}, "shared_weight has shape [40, 128], expected [num_shared * 2 * out_features=32, in_features=128]"),
        ({"shared_weight": torch.zeros(8, 128).bfloat16()}, "shared_weight has shape [8, 128], expected [num_shared * 2 * out_features=32, in_features=128]"),
        ({"shared_weight": torch.zeros(64, 192).bfloat16()}, "shared_weight has shape [64, 192], expected [num_shared * 2 * out_features=64, in_features=128]"),
        ({"shared_weight": torch.zeros(32, 200).bfloat16(), "gated": False}, "shared_weight has shape [32, 200], expected [out_features=32, num_shared * in_features=128]"),
        ({"shared_weight": torch.zeros(48, 256).bfloat16(), "gated": False}, "shared_weight has shape [48, 256], expected [out_features=32, num_shared * in_features=256]"),
        ({"shared_weight": torch.zeros(64).bfloat16()}, "shared_weight has shape [64], expected [rows, columns]"),
        ({"shared_weight": torch.zeros(64, 128)}, "shared_weight is float32, expected bfloat16"),
        ({"shared_weight": torch.zeros(64, 132).bfloat16()[:, :128]}, "shared_weight has rows off 16 bytes, expected rows that start on 16 bytes"),
        ({"expert_ends": torch.zeros(3, dtype=torch.int32)}, "expert_ends has shape [3], expected [experts + num_shared=5]"),
        ({"shared_weight": torch.zeros(32 * 1022, 128).bfloat16()}, "experts + num_shared is 1025, expected 1 to 1024"),
        (
            {"weight": torch.zeros(3, 32, 128).to(torch.float8_e4m3fn), "weight_scales": torch.ones(3, 1, 32)},
            "shared_weight is given, expected none with weight_scales",
        ),
    ],
)  # fmt: skip
def test_moe_grouped_gemm_of_shared_experts_error_messages(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 128).bfloat16(),
        "weight": torch.zeros(3, 32, 128).bfloat16(),
        "sorted_pairs": torch.zeros(4, dtype=torch.int64),
        "expert_ends": torch.zeros(5, dtype=torch.int32),
        "shared_weight": torch.zeros(64, 128).bfloat16(),
        "gated": True,
    } | changes
    with pytest.raises(ValueError) as error:
        sd.moe_grouped_gemm(**arguments)
    assert str(error.value) == f"moe_grouped_gemm: {message}"


@pytest.mark.sanitize
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "num_shared", "n_group"),
    [
        (0, 4, 2, 1, 1),
        (1, 1, 1, 1, 1),
        (1, 64, 4, 1, 1),
        (16, 64, 6, 2, 4),
        (3, 7, 7, 3, 1),
        (16, 512, 10, 1, 1),
        (9, 512, 1, 31, 1),
        (17, 512, 10, 1, 8),
        (5, 513, 30, 2, 1),
        (65, 1020, 9, 4, 1),
        (700, 60, 4, 4, 1),
    ],
)
def test_moe_route_with_shared_experts_matches_reference(
    rows: int,
    experts: int,
    top_k: int,
    num_shared: int,
    n_group: int,
    activation: str,
    has_gate: bool,
    device: torch.device,
) -> None:
    """Many scores tie. The gates are next to NaN, and some are infinite or NaN."""
    dtype = torch.bfloat16 if rows % 2 else torch.float32
    scores = ((torch.randn(rows, experts) * 3).round() / 2).to(dtype)
    wide = torch.full((rows, 3), torch.nan).to(dtype)
    wide[:, 1:2] = torch.randn(rows, 1) * 3
    wide[3:6, 1] = torch.tensor([torch.inf, -torch.inf, torch.nan])[: len(wide[3:6])]
    options: dict[str, Any] = {
        "activation": activation, "renormalize": True, "scale": 1.5, "n_group": n_group, "topk_group": (n_group + 1) // 2,
        "num_shared": num_shared,
    }  # fmt: skip
    gate = {"shared_gate": wide.to(device)[:, 1:2]} if has_gate else {}
    got = sd.moe_route(scores.to(device), top_k, **options, **gate)
    want = reference.moe_route(scores, top_k, **options, **{name: t.cpu() for name, t in gate.items()})
    check_routing(got, want)
    without = sd.moe_route(scores.to(device), top_k, **(options | {"num_shared": 0}))
    assert torch.equal(got.topk_ids[:, :top_k], without.topk_ids)
    assert torch.equal(got.topk_weights[:, :top_k], without.topk_weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared": -1}, "num_shared is -1, expected 0 to 28"),
        ({"num_shared": 29}, "num_shared is 29, expected 0 to 28"),
        ({"scores": torch.zeros(2, 1023), "num_shared": 2}, "experts + num_shared is 1025, expected 1 to 1024"),
        ({"scores": torch.zeros(50000, 8), "num_shared": 2}, "pairs is 300000, expected 0 to 262144"),
        ({"shared_gate": torch.zeros(2, 1)}, "shared_gate is given, expected none without num_shared"),
        (
            {"num_shared": 2, "shared_gate": torch.zeros(2, 2)},
            "shared_gate has shape [2, 2], expected [rows=2, 1]",
        ),
        (
            {"num_shared": 2, "shared_gate": torch.zeros(2, 1).half()},
            "shared_gate is float16, expected float32",
        ),
        (
            {"num_shared": 1, "out": sd.moe_route(torch.zeros(2, 8), 4)},
            "out.topk_ids has shape [2, 4], expected [rows=2, top_k + num_shared=5]",
        ),
    ],
)
def test_moe_route_with_shared_experts_error_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.moe_route(**({"scores": torch.zeros(2, 8), "top_k": 4} | changes))
    assert str(error.value) == f"moe_route: {message}"


# --- moe_combine


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "top_k", "width"), [(0, 2, 8), (1, 8, 2048), (3, 1, 7), (5, 9, 72), (300, 4, 264)])
def test_moe_combine_matches_reference(
    rows: int, top_k: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    wide = torch.randn(rows * top_k, width + 9, device=device).to(dtype)
    shares = torch.rand(rows, top_k, device=device)
    for made in (wide[:, :width], wide[:, 1 : width + 1]):  # the second off 16 bytes
        both = torch.full((rows, width + 8), torch.nan, device=device).to(dtype)
        out = sd.moe_combine(made, shares, out=both[:, :width])
        assert both[:, width:].isnan().all()
        if rows:
            check(out, reference.moe_combine(made, shares))
            assert torch.equal(out, sd.moe_combine(made, shares))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_outputs": torch.zeros(5, 8)}, "expert_outputs has shape [5, 8], expected [rows * top_k=6, width]"),
        ({"topk_weights": torch.zeros(2, 3).half()}, "topk_weights is float16, expected float32"),
        ({"out": torch.zeros(2, 8).half()}, "out is float16, expected float32"),
        ({"expert_outputs": torch.zeros(6, 0)}, "width is 0, expected 1 to 2147483647"),
    ],
)
def test_moe_combine_error_messages(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"expert_outputs": torch.zeros(6, 8), "topk_weights": torch.zeros(2, 3)} | changes
    with pytest.raises(ValueError) as error:
        sd.moe_combine(**arguments)
    assert str(error.value) == f"moe_combine: {message}"


# --- quantize_fp8


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 130), (2, 4096), (5, 12288), (300, 72), (1, 60000)])
def test_quantize_fp8_equals_reference(
    rows: int, width: int, group_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Results are equal bitwise: divisions and roundings are exact on all devices."""
    wide = (torch.randn(rows, width + 8, device=device) * 10 ** torch.randn(rows, 1, device=device)).to(dtype)
    for x in (wide[:, :width], wide[:, 1 : width + 1]):  # the second off 16 bytes
        if rows:
            x[0, : width // 2] = 0
        numbers = torch.full((rows, width + 16), torch.nan, device=device).to(torch.float8_e4m3fn)
        got, scales = sd.quantize_fp8(x, group_size=group_size, out=(numbers[:, :width], None))
        want, of_want = reference.quantize_fp8(x.cpu(), group_size=group_size)
        assert torch.equal(scales.cpu(), of_want)
        assert torch.equal(got.cpu().float(), want.float())
        assert numbers[:, width:].float().isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("rows", "width", "groups"),
    [
        (0, 8, 1),
        (1, 2, 1),
        (3, 130, 1),
        (3, 130, 2),
        (5, 768, 6),
        (300, 72, 1),
        (9, 12288, 96),
        (4, 192, 6),
        (2, 512, 128),
    ],
)
def test_dequantize_equals_reference(
    rows: int, width: int, groups: int, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Elements are rounded once from float32, which holds them exactly on all devices."""
    groups = groups if bits == 4 else 1 if groups == 1 else -(-width // 128)
    if bits == 4:
        weight = int4_weight(rows, width, groups, device)
        numbers, scales = weight["weight"], weight["weight_scales"]
    else:
        numbers = torch.randn(rows, width, device=device).to(torch.float8_e4m3fn)
        scales = torch.rand(groups, rows, device=device) + 0.5
    want = reference.dequantize(numbers, scales).float().to(dtype)
    for start in (0, 1):  # the second off 16 bytes
        out = torch.full((rows, width + 16), torch.nan, device=device).to(dtype)
        sd.dequantize(numbers, scales, out=out[:, start : start + width])
        assert torch.equal(out[:, start : start + width], want)
        assert out[:, :start].isnan().all() and out[:, start + width :].isnan().all()
    assert torch.equal(sd.dequantize(numbers, scales, dtype=str(dtype).removeprefix("torch.")), want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scales": torch.ones(3, 2)}, "groups is 3, expected 1 or 2"),
        (
            {"qweight": torch.zeros(2, 8, dtype=torch.uint8), "scales": torch.ones(3, 2)},
            "groups is 3, expected a divisor of 16",
        ),
        ({"qweight": torch.zeros(2, 8)}, "qweight is float32, expected float8_e4m3fn or uint8"),
        ({"out": torch.zeros(2, 4)}, "out has shape [2, 4], expected [rows=2, width=256]"),
    ],
)
def test_dequantize_error_messages(arguments: dict[str, torch.Tensor], message: str) -> None:
    numbers = torch.zeros(2, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError) as error:
        sd.dequantize(**({"qweight": numbers, "scales": torch.ones(1, 2)} | arguments))
    assert str(error.value) == f"dequantize: {message}"


def test_quantize_fp8_of_extreme_values(device: torch.device) -> None:
    """Zeros, the largest floats, and a given scale."""
    x = torch.tensor([[0.0, 0.0, 0.0], [3e38, -3e38, 1.0], [1e-38, 0.0, -1e-38]], device=device)
    numbers, scales = sd.quantize_fp8(x)
    assert numbers.float().tolist() == [[0, 0, 0], [448, -448, 0], [0, 0, 0]]
    assert scales[0].tolist() == [pytest.approx(1e-12), pytest.approx(3e38 / 448), pytest.approx(1e-12)]
    given = torch.tensor([0.5], device=device)
    numbers, scales = sd.quantize_fp8(torch.tensor([[1.0, 1e9, -0.26]], device=device), scale=given)
    assert numbers.float().tolist() == [[2, 448, -0.5]] and scales.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 64}, "quantize_fp8: group_size is 64, expected 128 or None"),
        (
            {"group_size": 128, "scale": torch.ones(1)},
            "quantize_fp8: scale is given, expected None with a group_size",
        ),
        (
            {"x": torch.zeros(2, 3, dtype=torch.int32)},
            "quantize_fp8: x is int32, expected float32 or float16 or bfloat16",
        ),
    ],
)
def test_quantize_fp8_error_messages(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.quantize_fp8(**({"x": torch.zeros(2, 256)} | arguments))
    assert str(error.value) == message


# --- rope_qkv_write_kv


def rotations(count: int, head_dim: int, device: torch.device) -> torch.Tensor:
    angles = torch.arange(count)[:, None] * 0.9 ** torch.arange(head_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("batch", "q_len", "heads", "kv_heads", "page_size"), [(3, 5, 4, 2, 4), (1, 1, 3, 1, 1)])
def test_rope_qkv_write_kv_matches_reference(
    batch: int,
    q_len: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    norms: bool,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    qkv = torch.randn(batch, q_len, heads + 2 * kv_heads, head_dim).to(dtype)
    table, num_pages = page_table(batch, 8)
    lens = torch.randint(0, 3 * page_size, (batch,), dtype=INT)
    positions = torch.randint(-2, 40, (batch, q_len), dtype=INT)
    weights = {f"{name}_norm": torch.randn(head_dim).to(dtype) if norms else None for name in "qk"}
    pools = [poisoned(num_pages, page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    valid = torch.randint(0, q_len + 1, (batch,), dtype=INT)
    turns = rotations(33, head_dim, torch.device("cpu"))
    inputs = [qkv, turns, positions, *pools, table, lens]
    got_inputs = [x.clone().to(device) for x in inputs]
    options = {"row_offset": 1, "eps": 1e-5}
    out = sd.rope_qkv_write_kv(
        *got_inputs,
        **options,
        num_valid=valid.to(device),
        **{name: None if w is None else w.to(device) for name, w in weights.items()},
    )
    want = reference.rope_qkv_write_kv(*inputs, **options, num_valid=valid, **weights)
    check(out, want, 2)
    got_k, got_v = got_inputs[3].cpu(), got_inputs[4]
    assert_same_bytes(got_v, pools[1])
    assert torch.equal(got_k.isnan(), pools[0].isnan())
    check(got_k.nan_to_num(), pools[0].nan_to_num(), 2)


def test_rope_qkv_write_kv_of_strided_heads_rounds_to_fp8_pools(device: torch.device) -> None:
    wide = torch.randn(2, 3, 8, 72, device=device).bfloat16()
    qkv = wide[:, :, 1:7, 3:67]
    table, num_pages = page_table(2, 2)
    pools = [torch.zeros(num_pages, 4, 2, 64, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    lens = torch.tensor([1, 4], dtype=INT, device=device)
    positions = torch.zeros(2, 3, dtype=INT, device=device)
    turns = rotations(1, 64, device)
    out = sd.rope_qkv_write_kv(qkv, turns, positions, *pools, table.to(device), lens, k_scale=0.5, v_scale=2.0)
    want = [torch.zeros_like(pool) for pool in pools]
    sd.write_kv(qkv[:, :, 2:4], qkv[:, :, 4:], *want, table.to(device), lens, k_scale=0.5, v_scale=2.0)
    assert torch.equal(out, qkv[:, :, :2])  # RoPE does not change position 0
    for pool, expected in zip(pools, want, strict=True):
        assert_same_bytes(pool, expected.cpu())


@pytest.mark.sanitize
def test_rope_qkv_write_kv_reports_rows_it_cannot_write(device: torch.device) -> None:
    table, num_pages = page_table(5, 2)
    table[1, 1] = -1
    pools = [poisoned(num_pages, 4, 1, 64).to(device) for _ in range(2)]
    refs = torch.ones(num_pages, dtype=INT)
    refs[table[2, 0]] = 2
    arguments = {
        "slots": torch.tensor([0, 1, 2, 3, 4, -1, 99], dtype=INT, device=device),
        "num_valid": torch.tensor([2, 2, 2, 2, 3, 2, 2], dtype=INT, device=device),
        "status": torch.tensor([0, 0, 0, Status.STALLED, 0], dtype=INT, device=device),
        "page_refs": refs.to(device),
    }
    qkv = torch.randn(7, 2, 3, 64, device=device)
    lens = torch.tensor([7, 3, 0, 0, 0], dtype=INT, device=device)
    out = sd.rope_qkv_write_kv(
        qkv,
        rotations(2, 64, device),
        torch.zeros(7, 2, dtype=INT, device=device),
        *pools,
        table.to(device),
        lens,
        **arguments,
    )
    assert arguments["status"].tolist() == [
        Status.BAD_LENGTH,
        Status.BAD_PAGE,
        Status.SHARED_PAGE,
        Status.STALLED,
        Status.BAD_LENGTH,
    ]
    assert torch.equal(out, qkv[:, :, :1])
    written = [(int(table[0, 1]), 3), (int(table[1, 0]), 3)]
    for pool in pools:
        assert {(page, row) for page, row in (~pool[:, :, 0, 0].isnan()).nonzero().tolist()} == set(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": (2, 3, 4, 96)}, "rope_qkv_write_kv: head_dim is 96, expected 64, 128 or 256"),
        (
            {"qkv": (2, 3, 2, 64)},
            "rope_qkv_write_kv: query_heads + 2 * heads is 2, expected 3 to 16384",
        ),
        (
            {"positions": (2, 4)},
            "rope_qkv_write_kv: positions has shape [2, 4], expected [batch=2, q_len=3]",
        ),
    ],
)
def test_rope_qkv_write_kv_error_messages(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"qkv": (2, 3, 4, 64), "positions": (2, 3)} | changes
    qkv = torch.zeros(shapes["qkv"])
    pool = torch.zeros(4, 4, 1, qkv.shape[-1])
    with pytest.raises(ValueError) as error:
        sd.rope_qkv_write_kv(
            qkv,
            torch.zeros(8, qkv.shape[-1]),
            torch.zeros(shapes["positions"], dtype=INT),
            pool,
            pool.clone(),
            torch.zeros(2, 2, dtype=INT),
            torch.zeros(2, dtype=INT),
        )
    assert str(error.value) == message
