"""A rank's share of a model whose attention heads and MLPs are divided among ranks (tensor parallelism)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One of `size` equal shares of a model.

    Head counts, linears and weights go by it: `config` has the head counts of the share, `slice` the weights. Code that
    builds layers sees a smaller model and knows of no ranks.
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

    def slice(self, tensor: Tensor, dim: int, what: str) -> Tensor:
        """Return a copy of this shard's slice of a dimension."""
        count = self.share(tensor.shape[dim], what)
        return tensor.narrow(dim, self.rank * count, count).clone()

    def config(self, config: Any, name: str = "model") -> Any:
        """Return the config of the share: fewer heads of the same size."""
        if self.size == 1:
            return config
        local = copy(config)
        local.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for count in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, count, None):
                setattr(local, count, self.share(getattr(config, count), f"{name}: {count}"))
        return local


WHOLE = Shard()
