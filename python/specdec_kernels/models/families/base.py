"""The base class of families, their registry, and what a config says of heads, lengths and windows."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ...plans import HEAD_DIMS
from ..layer_configs import layer_configs
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import pool_dim
from ..layers.norm import Norm
from ..layers.rope import constant_len
from ..state_cache import StateSpec


def largest(config: Any, name: str) -> int | None:
    """Return a value of the config; where it differs between layers, the largest."""
    each = (getattr(layer, name, None) for layer in layer_configs(config))
    return max((value for value in each if value is not None), default=None)


def head_dim_of(config: Any) -> int:
    return largest(config, "head_dim") or config.hidden_size // config.num_attention_heads


def latent_row_of(config: Any) -> int | None:
    """Return the elements of a layer's latent KV row; None: layers keep keys and values."""
    kind = _FAMILIES.get(config.model_type)
    return None if kind is None else kind(config).latent_row


def pool_dim_of(config: Any) -> int:
    """Return the elements of a head in KV pools.

    That is the next dimension that our kernels have, the head's own if there is none, or a latent row.
    """
    return latent_row_of(config) or pool_dim(head_dim_of(config))


def kv_heads_of(config: Any) -> int:
    """Return the KV heads of a layer; 1 for latent rows, which all heads share."""
    if latent_row_of(config):
        return 1
    heads = largest(config, "num_key_value_heads") or largest(config, "num_attention_heads")
    assert heads is not None
    return heads


def kv_numbers(config: Any, num_layers: int) -> int:
    """Return the elements of a KV row of `num_layers` layers: keys and values, or latent rows."""
    num_pools = 1 if latent_row_of(config) else 2
    return num_pools * num_layers * kv_heads_of(config) * pool_dim_of(config)


def position_limit(config: Any) -> int | None:
    """Return the longest sequence that the config allows; None: it sets no limit."""
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    limits = (getattr(config, name, None) for name in names)
    return next((limit for limit in limits if limit and limit > 0), None)


def check_length(config: Any, max_len: int, name: str) -> None:
    """Raise ValueError if `max_len` is longer than the model allows."""
    limit = position_limit(config)
    if limit is not None and max_len > limit:
        raise ValueError(f"{name}: max_position_embeddings is {limit}, expected at least max_len={max_len}")


def window_of(config: Any, index: int) -> int | None:
    """Return the sliding window of layer `index`, in rows including the row itself; None: all rows."""
    types = getattr(config, "layer_types", None) or []
    if index < len(types) and types[index] == "sliding_attention":
        window: int | None = config.sliding_window
        return window
    return None


class Decoder(NamedTuple):
    """The parts of a model, in the order in which a token passes them."""

    embedding: Embedding
    layers: list[Layer]
    norm: Norm
    head: LMHead


class Family:
    """Builds the layers of one `model_type` from a module of transformers.

    To add a family, register a subclass of this one or of a similar family:

        @register
        class Mine(Llama):
            model_type = "mine"

    Args:
        config: the model's, from transformers.
    """

    model_type: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()  # next to transformers: packages whose modules the family reads

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, name: str = "model") -> None:
        """Raise ValueError for a config that the layers cannot express; errors call the model `name`.

        No weight is loaded yet.
        """
        if (head_dim := head_dim_of(self.config)) > HEAD_DIMS[-1]:
            raise ValueError(f"{name}: head_dim is {head_dim}, expected at most {HEAD_DIMS[-1]}")

    def check_entries(self, name: str = "model") -> None:
        """Raise ValueError for an entry of the config that transformers' modules leave out, too."""

    def check_len(self, max_len: int, name: str = "model") -> None:
        """Raise ValueError if sequences of `max_len` tokens are too long for the model."""
        check_length(self.config, max_len, name)
        limit = constant_len(self.config)
        if limit is not None and max_len > limit:
            raise ValueError(
                f"{name}: rope_type is 'longrope', whose angles depend on a sequence's length beyond "
                f"original_max_position_embeddings={limit}, expected max_len of at most that (it is {max_len})"
            )

    def division(self) -> dict[str, Any]:
        """Return how modules and parameters are divided among ranks, by the ends of their paths; * is a number.

        A style is "colwise" (equal shares of output rows), "rowwise" (of input columns), "halves" (colwise in each
        half), "heads", "kv_heads", "replicated", or parts of rows, (heads, elements of each) next to each other. What
        is not here goes by `weights.sharding.COMMON` and the config's `base_model_tp_plan`.

        Raises:
            ValueError: the family cannot be divided.
        """
        return {}

    def window(self, index: int) -> int | None:
        """Return the sliding window of layer `index`, in rows including the row itself; None: all rows."""
        return None

    def state_specs(self, dtype: torch.dtype) -> list[StateSpec]:
        """Return what each layer with a recurrent state keeps, for weights of this dtype."""
        return []

    @property
    def latent_row(self) -> int | None:
        """Return the elements of a layer's latent KV row; None: layers keep keys and values."""
        rank: int | None = getattr(self.config, "kv_lora_rank", None)  # of a draft head with any type's config, too
        return None if rank is None else rank + self.config.qk_rope_head_dim

    @property
    def num_kv_layers(self) -> int:
        """Return the number of layers that keep KV rows."""
        count: int = self.config.num_hidden_layers
        return count

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        """Return the parts of a module whose weights are on the device, for sequences of up to `max_len` tokens."""
        raise NotImplementedError


_FAMILIES: dict[str, type[Family]] = {}
F = TypeVar("F", bound=type[Family])


def register(family: F) -> F:
    """Register a family under its `model_type`, in place of any other with that name."""
    _FAMILIES[family.model_type] = family
    return family


def known_families() -> tuple[str, ...]:
    """Return the model types that have a family."""
    return tuple(sorted(_FAMILIES))


def family_of(config: Any, name: str = "model") -> Family:
    """Return the family of a config; errors call its model `name`.

    Raises:
        ValueError: there is none.
    """
    if config.model_type not in _FAMILIES:
        raise ValueError(f"{name}: model_type is {config.model_type!r}, expected one of {known_families()}")
    return _FAMILIES[config.model_type](config)
