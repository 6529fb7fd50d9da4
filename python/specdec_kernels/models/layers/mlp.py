"""Dense feed-forward parts: the gated MLP (SwiGLU and others) and the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers.activations import SiLUActivation

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

    def __call__(self, normed: Tensor, residual: Tensor | None) -> tuple[LayerOutput, Tensor | None]:
        if self.activation is None:
            return self.down.add_to(residual, self.gate_up.swiglu(normed))
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.down.add_to(residual, self.activation(gate) * up)

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


def activation_of(activation: Activation) -> Activation | None:
    """Return what `GatedMLP` takes for the activation of a module: None for SiLU."""
    return None if isinstance(activation, (nn.SiLU, SiLUActivation)) else activation
