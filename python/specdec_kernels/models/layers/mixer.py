"""The part of a layer that mixes tokens, attention or a recurrence, and the cache that it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..kv_pools import KvLayout, KvPools
from ..state_cache import StateCache, StateSpec
from .linear import Linear
from .paged_batch import PagedBatch

CacheSpec = KvLayout | StateSpec


class Mixer(Protocol):
    """Mixes the rows of a pass with the tokens before them, which it knows from its cache alone."""

    out: Linear
    cache: Any  # `LayerKv` or `LayerState`, as `cache_spec` asks for; set by `attach_caches`

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache that the mixer needs: KV rows of each token, or a state of each sequence."""

    def write_cache(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Any:
        """Update the cache with normalized rows x [T, in], without their outputs."""

    def __call__(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Update the cache and return the rows' outputs before the projection `out`."""


def mixers_of(layers: Iterable[Any]) -> list[Mixer]:
    """Return the mixers of layers in order: one each, mostly; all of a layer that says so; none."""
    return [mixer for layer in layers for mixer in layer.mixers]


def kv_layouts_of(mixers: Sequence[Mixer]) -> list[KvLayout]:
    """Return the layouts of those mixers that keep KV rows, in order."""
    return [spec for mixer in mixers if isinstance(spec := mixer.cache_spec, KvLayout)]


def state_specs_of(mixers: Sequence[Mixer]) -> list[StateSpec]:
    """Return the specs of those mixers that keep a recurrent state, in order."""
    return [spec for mixer in mixers if isinstance(spec := mixer.cache_spec, StateSpec)]


def attach_caches(mixers: Sequence[Mixer], pools: KvPools, states: StateCache | None = None) -> None:
    """Give each mixer its layer's pools, or its layer's recurrent state.

    Raises:
        ValueError: a mixer keeps a recurrent state, and there are no states.
    """
    kv, recurrent = iter(pools.layers), iter(() if states is None else states.layers)
    for index, mixer in enumerate(mixers):
        if isinstance(mixer.cache_spec, KvLayout):
            mixer.cache = next(kv)
        elif states is None:
            raise ValueError(f"model: mixer {index} keeps a recurrent state, expected KV in every layer")
        else:
            mixer.cache = next(recurrent)
