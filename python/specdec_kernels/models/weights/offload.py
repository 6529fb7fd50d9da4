"""Weights offloaded to host memory or dropped. Tensors stay the same objects, and keep their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..layers.moe import QuantizedExperts
from ..layers.quantized import QuantizedLinear
from .sharding import DIVISION, Division
from .update import Update

LARGE = ("qweight", "scales")  # buffers of a quantized linear that are worth offloading


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint would replace: parameters, and qweights and scales of quantized linears."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    for path, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            weights |= {f"{path}.{name}": tensor for name in LARGE if (tensor := part._buffers.get(name)) is not None}
        if isinstance(part, QuantizedExperts):
            weights |= {f"{path}.{name}": buffer for name, buffer in part.named_buffers(recurse=False)}
    division: Division | None = getattr(module, DIVISION, None)
    if division is not None and division.tied_head is not None:
        del weights[division.tied_head]  # rows of the embedding
    return weights


def offload(weights: Mapping[str, Tensor], *, drop: bool) -> None:
    """Move the weights to host memory, or with `drop` free them."""
    with torch.inference_mode(False), torch.no_grad():
        for tensor in weights.values():
            tensor.data = tensor.data.new_empty(1).expand(tensor.shape) if drop else tensor.data.cpu()


def onload(weights: Mapping[str, Tensor], device: torch.device, *, dropped: bool) -> None:
    """Move the weights back to the device; dropped ones are zeros."""
    with torch.inference_mode(False), torch.no_grad():
        for tensor in weights.values():
            if dropped:
                tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            else:
                tensor.data = tensor.data.to(device)


def unfuse_quantized(module: nn.Module) -> None:
    """Make fused quantized linears separate, until they are fused again."""
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            part.fused = None


@dataclass
class MissingWeight:
    """A weight of which some elements have not been written.

    Attributes:
        weight: the tensor.
        written: the number of elements of each part that has been written, by the part's offset in the weight.
    """

    weight: Tensor
    written: dict[int, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return sum(self.written.values()) >= self.weight.numel()


class MissingWeights:
    """Weights that must be written before any pass uses them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._missing = {name: MissingWeight(weight) for name, weight in weights.items()}

    def record(self, updates: Iterable[Update]) -> None:
        """Record that these updates have been written, to whole weights or to parts of them."""
        by_id = {id(missing.weight): name for name, missing in self._missing.items()}
        for update in updates:
            name = by_id.get(id(update.weight))
            if name not in self._missing:
                continue
            missing = self._missing[name]
            offset = int(update.place.storage_offset() - missing.weight.storage_offset())
            missing.written[offset] = update.place.numel()
            if missing.is_whole:
                del self._missing[name]

    @property
    def names(self) -> list[str]:
        return list(self._missing)
