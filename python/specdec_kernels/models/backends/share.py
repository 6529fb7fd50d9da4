"""The share of a rank in a divided model, from the model's config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..families import kv_numbers
from ..layers.reduction import LOCAL
from ..shard import Shard
from ..state_cache import bytes_of
from ..weights.model_config import StoredConfig, empty_module, keep_text_only
from ..weights.sharding import Cut, Division
from .native import supported_family


@dataclass(frozen=True)
class Share:
    """The share of one rank in a model, the largest if they differ.

    Attributes:
        weights: bytes in the config's dtype; None: of a quantized checkpoint, whose scales the config does not tell.
        kv_elements: of a token in all layers.
        state: bytes of the recurrent states of a request.
        state_of_node: further bytes for each node of a request's tree.
    """

    weights: int | None
    kv_elements: int
    state: int
    state_of_node: int

    def tokens(self, memory: int, kv_bytes: int) -> int | None:
        """Return the tokens whose KV fits next to the weights, with elements of `kv_bytes`; None: not known."""
        return None if self.weights is None else max(memory - self.weights, 0) // (kv_bytes * self.kv_elements)


def share_of(model: str | Path, size: int, name: str = "model") -> Share:
    """Return what one of `size` ranks holds of the model of a folder or hub id. No weight is loaded.

    Raises:
        ValueError: what an engine with that many ranks refuses by the config, by name.
    """
    stored = StoredConfig.read(model, name)
    text = stored.text
    shard = Shard(0, size)  # its part of the vocabulary is the largest
    whole = supported_family(text, 2, name)
    local = supported_family(shard.config(text, name), 2, name) if size > 1 else whole
    dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.bfloat16
    module, cuts = empty_module(stored.whole, stored.what, dtype), dict[str, Cut]()
    keep_text_only(module)
    if size > 1:
        division = Division(text, whole.division(), shard, LOCAL, name)
        cuts = division.cuts(module)
        division.attach(module)
    specs = local.state_specs(dtype)
    state, with_node = (sum(bytes_of(spec, 1, nodes) for spec in specs) for nodes in (0, 1))
    parameters = dict(module.named_parameters())
    return Share(
        weights=None if stored.scheme else sum(part_bytes(p, cuts.get(key)) for key, p in parameters.items()),
        kv_elements=kv_numbers(local.config, local.num_kv_layers),
        state=state,
        state_of_node=with_node - state,
    )


def part_bytes(parameter: torch.Tensor, cut: Cut | None) -> int:
    """Return the bytes that a rank keeps of a parameter; without a cut, all."""
    if cut is None or cut.is_zero:
        return parameter.nbytes
    kept = sum(map(len, cut.ranges))
    return math.prod(parameter.shape) // parameter.shape[cut.dim] * kept * parameter.itemsize
