"""Comparisons of a result with its reference; a failure says what differs."""

from __future__ import annotations

import torch
from torch import Tensor


class WrongResult(Exception):
    """An op's output differs from its reference."""


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an output filled with garbage, so that an unwritten element shows."""
    garbage = torch.nan if dtype.is_floating_point else -123456
    return torch.full(shape, garbage, dtype=dtype, device=device)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def expect_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Require the same shape and elements."""
    compare(name, got, want, lambda g, w: g == w)


def expect_close(name: str, got: Tensor, want: Tensor, atol: float) -> None:
    """Require the same shape and infinities, and finite elements within atol."""
    compare(name, got, want, lambda g, w: (g == w) | ((g.double() - w.double()).abs() <= atol))


def expect_near(name: str, got: Tensor, want: Tensor, error: float) -> None:
    """Require a relative error of the whole tensor, |got - want| / |want|, of at most `error`."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    expect_shape(name, got, want)
    scale = want.norm().clamp(min=1e-30)
    relative = float((got - want).norm() / scale)
    if not relative <= error:  # NaN never passes
        raise WrongResult(f"{name} is off by {relative:.2e} of its norm, allowed {error:.0e}")


def expect_shape(name: str, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise WrongResult(f"{name} has shape {list(got.shape)}, expected {list(want.shape)}")


def compare(name: str, got: Tensor, want: Tensor, same: object) -> None:
    assert callable(same)
    got, want = got.detach().cpu(), want.detach().cpu()
    expect_shape(name, got, want)
    differs = (~same(got, want)).nonzero()
    if len(differs):
        at = tuple(differs[0].tolist())
        raise WrongResult(
            f"{name} differs in {len(differs)} of {got.numel()} elements, first at {list(at)}: "
            f"got {got[at].item()}, expected {want[at].item()}"
        )
