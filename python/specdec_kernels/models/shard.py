"""A rank's share of a model whose attention heads and MLPs are divided among ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

from .layer_configs import layer_configs

# Counts of heads in configs. Several heads share one of the second kind; ranks may be more than these.
QUERY_HEADS = "num_attention_heads"
DIVIDED = (
    QUERY_HEADS, "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads",
    "mamba_num_heads",
)  # fmt: skip
SHARED = ("num_key_value_heads", "mamba_n_groups", "n_groups")


@dataclass(frozen=True)
class Shard:
    """One of `size` equal shares of a model.

    Head counts and weights go by it: `config` has the head counts of the share. Code that builds layers sees a smaller
    model and knows of no ranks.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Shard: rank is {self.rank}, expected 0 to {self.size - 1}")

    def share(self, count: int, what: str) -> int:
        """Return this shard's share of a count; ValueError, by name, if it cannot be divided equally."""
        if count % self.size:
            raise ValueError(f"{what} is {count}, expected a multiple of {self.size} (ranks)")
        return count // self.size

    def heads(self, count: int, what: str) -> range:
        """Return this shard's heads of `count`. Heads that are fewer than ranks are replicated, on neighbors.

        Raises:
            ValueError: neither divides the other; the message begins with `what`.
        """
        if count % self.size == 0:
            own = count // self.size
            return range(self.rank * own, (self.rank + 1) * own)
        if self.size % count == 0:
            head = self.rank * count // self.size
            return range(head, head + 1)
        raise ValueError(f"{what} is {count}, expected a multiple or a divisor of {self.size} (ranks)")

    def ranges(self, parts: Iterable[tuple[int, int]], what: str) -> tuple[range, ...]:
        """Return the ranges of this shard's heads, for parts of (heads, elements of each) next to each other.

        Raises:
            ValueError: as `heads`.
        """
        begin, ranges = 0, list[range]()
        for count, size in parts:
            own = self.heads(count, what)
            ranges.append(range(begin + own.start * size, begin + own.stop * size))
            begin += count * size
        return tuple(ranges)

    def config(self, config: Any, name: str = "model") -> Any:
        """Return the config of the share: fewer heads of the same size.

        Raises:
            ValueError: a count cannot be divided; one that differs between layers, other than of query heads.
        """
        if self.size == 1:
            return config
        different = {*DIVIDED, *SHARED} & (getattr(config, "per_layer_attributes", None) or set())
        if several := different - {QUERY_HEADS}:
            raise ValueError(f"{name}: {min(several)} differs between layers, which is not divided among ranks")
        local = copy(config)
        if different:
            of_layers = [self.share(each, f"{name}: {QUERY_HEADS}") for each in query_heads(config)]
            local.per_layer_config = None
        if not getattr(config, "head_dim", None):
            local.head_dim = config.hidden_size // local.num_attention_heads
        for count in DIVIDED:
            if getattr(local, count, None):
                setattr(local, count, self.share(getattr(local, count), f"{name}: {count}"))
        for count in SHARED:
            if getattr(config, count, None):
                setattr(local, count, len(self.heads(getattr(config, count), f"{name}: {count}")))
        if different:
            local.per_layer_config = {layer: {QUERY_HEADS: own} for layer, own in enumerate(of_layers)}
        return local


def query_heads(config: Any) -> list[int]:
    """Return the query heads of each layer, or of all layers if none has entries of its own."""
    return [layer.num_attention_heads for layer in layer_configs(config)]


WHOLE = Shard()
