"""Weights out of the way for a while: in host memory, or nowhere. Tensors stay the objects that they are, and keep
their shapes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..layers.moe import QuantizedExperts
from ..layers.quantized import QuantizedLinear
from .update import Update

HEAVY = ("qweight", "scales")  # of a quantised product


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All that a checkpoint would replace: parameters, and numbers and scales of quantised products."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    for path, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            weights |= {f"{path}.{name}": tensor for name in HEAVY if (tensor := part._buffers.get(name)) is not None}
        if isinstance(part, QuantizedExperts):
            weights |= {f"{path}.{name}": buffer for name, buffer in part.named_buffers(recurse=False)}
    return weights


def stow(weights: Mapping[str, Tensor], *, drop: bool) -> None:
    """To host memory, where they are not there already, or with `drop` nowhere."""
    with torch.inference_mode(False), torch.no_grad():
        for tensor in weights.values():
            tensor.data = tensor.data.new_empty(1).expand(tensor.shape) if drop else tensor.data.cpu()


def fetch(weights: Mapping[str, Tensor], device: torch.device, *, dropped: bool) -> None:
    """Back to the device; those that were dropped as zeros."""
    with torch.inference_mode(False), torch.no_grad():
        for tensor in weights.values():
            if dropped:
                tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            else:
                tensor.data = tensor.data.to(device)


def forget_joined(module: nn.Module) -> None:
    """Quantised products that were joined become products of their own, until they are joined anew."""
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            part.fused = None


class Lacking:
    """Weights that are to be given before anybody computes with them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._left = {name: tensor.nbytes for name, tensor in weights.items()}
        self._places = sorted((tensor.data_ptr(), name) for name, tensor in weights.items())
        self._given: dict[str, dict[int, int]] = {}  # of a weight that comes in parts: where, and how many bytes

    def note(self, updates: Iterable[Update]) -> None:
        """These have been written, whole weights or parts of them."""
        for update in updates:
            begin, count = update.place.data_ptr(), update.place.nbytes
            behind = bisect_right(self._places, begin, key=lambda place: place[0])
            first, name = self._places[behind - 1] if behind else (begin, "")
            if name in self._left and begin + count <= first + self._left[name]:
                given = self._given.setdefault(name, {})
                given[begin] = count
                if sum(given.values()) >= self._left[name]:
                    del self._left[name]

    @property
    def names(self) -> list[str]:
        return list(self._left)
