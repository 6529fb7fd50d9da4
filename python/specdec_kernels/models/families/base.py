"""What a family is, and which there are."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ...plans import HEAD_DIMS
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import pool_dim
from ..layers.norm import Norm
from ..layers.rope import constant_len


def largest(config: Any, name: str) -> int | None:
    """What the config calls by this name, or where it differs between layers the largest of them."""
    if getattr(config, "is_heterogeneous", False):
        each = [getattr(config.per_layer_config[layer], name, None) for layer in range(config.num_hidden_layers)]
        return max((value for value in each if value is not None), default=None)
    value: int | None = getattr(config, name, None)
    return value


def head_dim_of(config: Any) -> int:
    return largest(config, "head_dim") or config.hidden_size // config.num_attention_heads


def pool_dim_of(config: Any) -> int:
    """Numbers of a head in KV pools: the next that our kernels have, or where there is none the head's own."""
    return pool_dim(head_dim_of(config))


def kv_heads_of(config: Any) -> int:
    heads = largest(config, "num_key_value_heads") or largest(config, "num_attention_heads")
    assert heads is not None
    return heads


def kv_numbers(config: Any, num_layers: int) -> int:
    """Numbers that a KV row takes, keys and values of so many layers together."""
    return 2 * num_layers * kv_heads_of(config) * pool_dim_of(config)


def position_limit(config: Any) -> int | None:
    """Tokens of a text that a model of this config allows; None: its config sets no limit."""
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    limits = (getattr(config, name, None) for name in names)
    return next((limit for limit in limits if limit and limit > 0), None)


def check_length(config: Any, max_len: int, name: str) -> None:
    """ValueError for texts that are longer than the model's."""
    limit = position_limit(config)
    if limit is not None and max_len > limit:
        raise ValueError(f"{name}: max_position_embeddings is {limit}, expected at least max_len={max_len}")


def window_of(config: Any, index: int) -> int | None:
    """How many rows of its path a row sees in layer `index`, itself among them; None: all."""
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
    """How a model of one `model_type` becomes parts.

    A family of one's own is a subclass, of this or of one that is nearly it, under another name:

        @register
        class Mine(Llama):
            model_type = "mine"

    Args:
        config: of the model, by transformers.
    """

    model_type: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()  # beside transformers: where classes of modules are that the family reads

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, name: str = "model") -> None:
        """ValueError for what the parts cannot express of a model that errors call `name`. No weight is loaded yet."""
        if (head_dim := head_dim_of(self.config)) > HEAD_DIMS[-1]:
            raise ValueError(f"{name}: head_dim is {head_dim}, expected at most {HEAD_DIMS[-1]}")

    def check_len(self, max_len: int, name: str = "model") -> None:
        """ValueError for sequences that are longer than those of the model."""
        check_length(self.config, max_len, name)
        limit = constant_len(self.config)
        if limit is not None and max_len > limit:
            raise ValueError(
                f"{name}: rope_type is 'longrope', whose angles depend on a sequence's length beyond "
                f"original_max_position_embeddings={limit}, expected max_len of at most that (it is {max_len})"
            )

    def window(self, index: int) -> int | None:
        """How many rows of its path a row sees in layer `index`, itself among them; None: all."""
        return None

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        """The parts of a module whose weights are on the device, for sequences of up to `max_len` tokens."""
        raise NotImplementedError


_FAMILIES: dict[str, type[Family]] = {}
F = TypeVar("F", bound=type[Family])


def register(family: F) -> F:
    """Makes the family known, under its `model_type`; one that has this name already is replaced."""
    _FAMILIES[family.model_type] = family
    return family


def known_families() -> tuple[str, ...]:
    """The model types that have a family."""
    return tuple(sorted(_FAMILIES))


def family_of(config: Any, name: str = "model") -> Family:
    """The family of the config of a model that errors call `name`.

    Raises:
        ValueError: there is none.
    """
    if config.model_type not in _FAMILIES:
        raise ValueError(f"{name}: model_type is {config.model_type!r}, expected one of {known_families()}")
    return _FAMILIES[config.model_type](config)
