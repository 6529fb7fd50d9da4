"""compute_gates against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import recurrent as reference


def assert_matches_reference(
    device: torch.device, a: Tensor, b: Tensor | None, decay: Tensor, dt_bias: Tensor, **options: Any
) -> None:
    given = [None if x is None else x.to(device) for x in (a, b, decay, dt_bias)]
    got = sd.compute_gates(*given, **options)
    assert [x.dtype for x in got] == [torch.float32] * 2
    for x, want in zip(got, reference.compute_gates(a, b, decay, dt_bias, **options), strict=True):
        torch.testing.assert_close(x.cpu().double(), want, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("bias_dtype", [torch.float32, None], ids=["float32 bias", "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes"), [(0, (3,)), (1, (1,)), (5, (32,)), (130, (129,)), (3, (3, 5)), (2, (32, 128)), (1, (1, 256))]
)
def test_compute_gates_matches_reference(
    device: torch.device, rows: int, sizes: tuple[int, ...], dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    """Of rows that lie apart, with logits on both sides of where softplus is linear."""
    heads = sizes[0]
    projected = (10 * torch.randn(rows, 2 * heads + 1)).to(dtype)
    b = projected[:, :heads]
    a = projected[:, heads + 1 :] if len(sizes) == 1 else (10 * torch.randn(rows, heads + 2, *sizes[1:])).to(dtype)
    a = a[:, :heads]
    decay, dt_bias = -3 * torch.rand(heads), torch.randn(sizes).to(bias_dtype or dtype)
    assert_matches_reference(device, a, b, decay, dt_bias)
    if len(sizes) == 1:
        assert_matches_reference(device, a, None, decay, dt_bias)
        assert_matches_reference(device, a, None, decay, dt_bias, dt_min=0.01, dt_max=0.75)


def test_compute_gates_by_hand(device: torch.device) -> None:
    a = torch.tensor([[0.0, 30.0, -200.0]], device=device)
    b, decay, dt_bias = torch.zeros_like(a), torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([0.0, 1.0, 0.0])
    g, beta = sd.compute_gates(a, b, decay.to(device), dt_bias.to(device))
    torch.testing.assert_close(g.cpu(), torch.tensor([[-0.6931472, -62.0, 0.0]]))
    assert beta.tolist() == [[0.5, 0.5, 0.5]]
    dt = sd.compute_gates(a, None, decay.to(device), dt_bias.to(device), dt_min=0.5, dt_max=7.0)[1]
    torch.testing.assert_close(dt.cpu(), torch.tensor([[0.6931472, 7.0, 0.5]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.ones(3, 2).half()}, "compute_gates: b is float16, expected float32"),
        ({"decay": torch.ones(3)}, "compute_gates: decay has shape [3], expected [value_heads=2]"),
        ({"dt_bias": torch.ones(2, 1)}, "compute_gates: dt_bias has shape [2, 1], expected [value_heads=2]"),
        ({"a": torch.ones(3)}, "compute_gates: a has 1 dimension, expected 2 dimensions"),
        ({"a": torch.ones(3, 2, 4), "b": None},
         "compute_gates: b is None, expected a tensor, as a has 3 dimensions"),
        ({"dt_min": -1.0}, "compute_gates: dt_min is -1.000000, expected 0 or more"),
        ({"dt_min": 0.5, "dt_max": 0.25}, "compute_gates: dt_max is 0.250000, expected dt_min=0.500000 or more"),
    ],
)  # fmt: skip
def test_compute_gates_refuses_by_name(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "a": torch.ones(3, 2),
        "b": torch.ones(3, 2),
        "decay": torch.ones(2),
        "dt_bias": torch.ones(2),
    }
    with pytest.raises(ValueError) as error:
        sd.compute_gates(**(given | change))
    assert str(error.value) == message
