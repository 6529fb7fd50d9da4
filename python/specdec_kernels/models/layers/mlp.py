"""Dense feed-forward parts: the gated MLP (SwiGLU and others) and the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from ...ops import silu_and_mul
from .linear import Linear
from .outputs import LayerOutput, combined


class FeedForward(Protocol):
    """The part of a layer after attention: an MLP or a MoE."""

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        """Return the part's output for normalized rows [T, H], and the residual that is still to be added to it.

        If the second is None, the first is the sum of both, written over the residual. Without a residual the output
        is a tensor or a partial sum.
        """


Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GatedMLP(FeedForward):
    """down(activation(gate(x)) * up(x)): SwiGLU, fused, where no activation is named; others take a launch more."""

    gate_up: Linear
    down: Linear
    activation: Activation | None = None
    limit: float | None = None  # as in `gated`

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        if self.activation is None and self.limit is None:
            return self.down.add_to(residual, self.gate_up.swiglu(normed))
        return self.down.add_to(residual, gated(self.activation, self.limit)(self.gate_up(normed)))

    def output(self, normed: Tensor) -> Tensor:
        """Return the output [T, H] alone."""
        return combined(self(normed, None)[0])


@dataclass(frozen=True)
class MLP(FeedForward):
    """down(activation(up(x)))."""

    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        return self.down.add_to(residual, self.activation(self.up(normed)))


def gated(activation: Activation | None, limit: float | None = None) -> Callable[[Tensor], Tensor]:
    """Return the function of columns [gate, up] that computes activation(gate) * up, fused for SiLU without a limit.

    None is SiLU. With a limit, activation(gate) is at most that, and up is clamped to it on both sides (Step-3.5).
    """
    other = None if activation is None else activation_of(activation)
    if other is None and limit is None:
        return silu_and_mul
    activate = functional.silu if other is None else other

    def act(wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        if limit is None:
            return activate(gate) * up
        return activate(gate).clamp(max=limit) * up.clamp(-limit, limit)

    return act


def activation_of(activation: Activation) -> Activation | None:
    """Return what `GatedMLP` takes for the activation of a module: None for SiLU."""
    return None if isinstance(activation, (nn.SiLU, SiLUActivation)) else activation
