"""small_m_bmm against its reference: heads of few rows times weights of their own, in both layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.models.layers import latent_attention
from specdec_kernels.reference import layers as reference
from support.devices import TOLERANCES

HALVES = [torch.float16, torch.bfloat16]
LAYOUTS = ["outs", "ins"]  # which dimension of the weights is contiguous
# Heads, in_features and out_features: the least ones and ones that divide into no wide tiles; those of models.
SIZES = [(1, 32, 16), (3, 64, 48), (5, 96, 32), (2, 512, 64), (7, 160, 112), (2, 1024, 16)]
MODEL_SIZES = [(20, 192, 512), (20, 512, 256), (16, 128, 512), (16, 512, 128), (40, 1024, 64)]
ROWS = (0, *range(1, 18), 31, 32, 100)


def check(got: Tensor, want: Tensor) -> None:
    """Check an error of a few roundings against the float64 result, relative to its scale."""
    error = float((got.double().cpu() - want.double().cpu()).abs().max())
    assert error <= TOLERANCES[got.dtype] * max(1.0, float(want.abs().max())), error


def weights(heads: int, ins: int, outs: int, layout: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weights [heads, ins, outs] that are parts of larger ones, with NaN around them."""
    shape = (heads, ins, outs) if layout == "outs" else (heads, outs, ins)
    whole = torch.full((heads, shape[1] + 3, shape[2] + 16), torch.nan, dtype=dtype, device=device)
    part = whole[:, 2 : 2 + shape[1], 8:-8]
    part.copy_(torch.randn(shape) * ins**-0.5)
    return part if layout == "outs" else part.mT


def heads_of_rows(rows: int, heads: int, ins: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows [rows, heads, ins] that are parts of wider heads, with NaN around them."""
    whole = torch.full((rows + 1, heads + 1, ins + 24), torch.nan, dtype=dtype, device=device)
    part = whole[:rows, :heads, 16:-8]
    part.copy_(torch.randn(rows, heads, ins))
    return part


def check_sizes(rows: int, sizes: tuple[int, int, int], layout: str, dtype: torch.dtype, device: torch.device) -> None:
    heads, ins, outs = sizes
    x, weight = heads_of_rows(rows, heads, ins, dtype, device), weights(*sizes, layout, dtype, device)
    whole = torch.full((rows, heads, outs + 5), torch.nan, dtype=dtype, device=device)
    out = whole[..., 3 : 3 + outs]
    assert sd.small_m_bmm(x, weight, out=out) is out
    assert whole[..., :3].isnan().all() and whole[..., 3 + outs :].isnan().all()
    if rows:
        check(out, reference.small_m_bmm(x, weight))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [*(pytest.param(sizes, marks=pytest.mark.sanitize) for sizes in SIZES), *MODEL_SIZES], ids=str
)
def test_heads_are_those_of_the_reference(
    sizes: tuple[int, int, int], layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    for rows in (1,) if device.type == "cpu" and sizes in MODEL_SIZES else ROWS:
        check_sizes(rows, sizes, layout, dtype, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_depend_on_the_batch(layout: str, device: torch.device) -> None:
    x = heads_of_rows(40, 5, 96, torch.bfloat16, device)
    weight = weights(5, 96, 64, layout, torch.bfloat16, device)
    whole = sd.small_m_bmm(x, weight)
    for first, last in itertools.pairwise((0, 1, 4, 12, 28, 40)):
        assert torch.equal(sd.small_m_bmm(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_latent_attention_writes_heads_in_place(rows: int, layout: str, device: torch.device) -> None:
    x = heads_of_rows(rows, 3, 64, torch.bfloat16, device)
    weight = weights(3, 64, 48, layout, torch.bfloat16, device)
    out = torch.full((rows, 3, 64), torch.nan, dtype=torch.bfloat16, device=device)
    latent_attention.multiply_heads(x, weight, out[..., :48])
    check(out[..., :48], reference.small_m_bmm(x, weight))
    assert out[..., 48:].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 3, 64)}, "x is float32, expected float16 or bfloat16"),
        ({"x": torch.zeros(2, 64).half()}, "x has 2 dimensions, expected 3 dimensions"),
        ({"x": torch.zeros(2, 3, 48).half()}, "in_features is 48, expected a multiple of 32"),
        ({"x": torch.zeros(2, 3, 2048).half()}, "in_features is 2048, expected 32 to 1024"),
        ({"x": torch.zeros(1, 1, 64).half().expand(1 << 19, 3, 64)}, "rows is 524288, expected 0 to 262144"),
        ({"x": torch.zeros(1, 1, 64).half().expand(2, 65536, 64)}, "heads is 65536, expected 0 to 65535"),
        ({"x": torch.zeros(2, 3, 65).half()[..., 1:]}, "x has rows off 16 bytes, expected rows that start on 16 bytes"),
        ({"weight": torch.zeros(3, 64, 32).bfloat16()}, "weight is bfloat16, expected float16"),
        ({"weight": torch.zeros(2, 64, 32).half()}, "weight has shape [2, 64, 32], expected [heads=3, in_features=64, out_features]"),
        ({"weight": torch.zeros(3, 64, 40).half()}, "out_features is 40, expected a multiple of 16"),
        ({"weight": torch.zeros(3, 64, 64).half()[..., ::2]}, "weight has shape [3, 64, 32] and is contiguous in neither of its last two dimensions, expected a stride of 1 in one of them"),
        ({"weight": torch.zeros(3, 64, 36).half()[..., 4:]}, "weight has rows off 16 bytes, expected rows that start on 16 bytes"),
        ({"weight": torch.zeros(3, 32, 68).half()[..., 4:].mT}, "weight has rows off 16 bytes, expected rows that start on 16 bytes"),
        ({"out": torch.zeros(2, 3, 64).half()}, "out has shape [2, 3, 64], expected [rows=2, heads=3, out_features=32]"),
        ({"out": torch.zeros(2, 3, 64).half()[..., ::2]}, "out has shape [2, 3, 32] and is not contiguous in its last dimension, expected a last stride of 1"),
    ],
)  # fmt: skip
def test_error_messages(changes: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 3, 64).half(), "weight": torch.zeros(3, 64, 32).half()}
    with pytest.raises(ValueError) as error:
        sd.small_m_bmm(**(arguments | changes))
    assert str(error.value) == f"small_m_bmm: {message}"
