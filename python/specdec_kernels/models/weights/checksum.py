"""A checksum over samples of a model's weights, the same for a whole model and for one that ranks divide."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.moe import QuantizedExperts
from ..layers.quantized import QuantizedLinear, QuantizedWeight
from .sharding import DIVISION, Division, Kept

SAMPLED = 32  # elements of each weight


class Sample(NamedTuple):
    """The bytes of sampled elements, and which of them this rank has; None: it has all, and so has every rank."""

    values: Tensor  # [bytes] uint8
    is_own: Tensor | None = None  # [bytes] bool


@torch.no_grad()
def checksum(model: Any) -> str:
    """Return a checksum over SAMPLED elements of each weight, which tells fine-tuned models of one shape apart.

    Ranks that divide a model call it together. On rank 0 it is that of the whole model.
    """
    division: Division | None = getattr(model, DIVISION, None)
    samples = [sample(weight, kept) for weight, kept in named_weights(model, division)]
    if division is not None:
        samples = joined(samples, division)
    values = torch.cat([each.values for each in samples])
    return hashlib.blake2b(values.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def named_weights(model: Any, division: Division | None) -> Iterator[tuple[Tensor | QuantizedWeight, Kept | None]]:
    """Yield the weights in the order of their names, and what this rank keeps of each; None: all."""
    weights: dict[str, Tensor | QuantizedWeight] = {name: each.detach() for name, each in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weights[path] = module.weight
        elif isinstance(module, QuantizedExperts):
            weights |= {f"{path}.{name}": buffer for name, buffer in module.named_buffers(recurse=False)}
    if division is not None and division.tied_head is not None:
        del weights[division.tied_head]  # rows of the embedding
    for name in sorted(weights):
        kept = None if division is None else division.kept.get(name)
        yield weights[name], None if kept is not None and kept.cut.is_zero else kept


def sample(weight: Tensor | QuantizedWeight, kept: Kept | None) -> Sample:
    """Return samples of a weight at places that depend on the shape of the whole weight alone."""
    shape = (tuple(weight.shape) if kept is None else kept.shape) or (1,)
    count = math.prod(shape)
    places = torch.arange(0, count, max(1, count // SAMPLED), device=weight.device)[:SAMPLED]
    where, is_own = list(torch.unravel_index(places, shape)), None
    if kept is not None:
        where[kept.cut.dim], is_own = kept.cut.local(where[kept.cut.dim])
    if isinstance(weight, QuantizedWeight):
        values = weight.pick_rows(where[0]).dequantize().gather(1, where[1][:, None])
    else:
        bits = weight.view(torch.uint8) if weight.itemsize == 1 else weight
        values = bits.reshape(weight.shape or (1,))[tuple(where)]
    values = values.contiguous().view(-1).view(torch.uint8)
    return Sample(values, None if is_own is None else is_own.repeat_interleave(len(values) // len(places)))


def joined(samples: Sequence[Sample], division: Division) -> list[Sample]:
    """Return the samples of the whole weights, from the parts that ranks have."""
    parts = [(each.values, each.is_own) for each in samples if each.is_own is not None]
    values, is_own = (torch.cat(each) for each in zip(*parts, strict=True))
    both = torch.stack([values, is_own.to(torch.uint8)])
    every = division.reduction.gather(both.view(-1)).view(division.shard.size, 2, -1)
    first = every[:, 1].argmax(0, keepdim=True)  # the first rank that has an element
    whole = every[:, 0].gather(0, first).squeeze(0)
    wholes = iter(torch.split(whole, [len(values) for values, _ in parts]))
    return [each if each.is_own is None else Sample(next(wholes)) for each in samples]
