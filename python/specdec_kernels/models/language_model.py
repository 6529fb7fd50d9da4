"""The protocol of a language model that engine, drafts and benchmarks use, and its two backends.

Native: our layers (`CausalLM`), for the registered families. Transformers: its own modules, with our paged tree
attention registered in its attention interface (`TransformersLM`), for all other models that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .backends.native import CausalLM, Prefilled, States, check_supported
from .families import family_of, largest
from .kv_pools import KvPools
from .layers.paged_batch import LastRows, PagedBatch
from .options import ModelOptions
from .weights.loading import config_of, storage_of
from .weights.update import Update

IMPLEMENTATIONS = ("auto", "native", "transformers")


class LanguageModel(Protocol):
    """A causal language model over KV pools of its own."""

    model: Any  # the module of transformers
    is_given: bool  # whether that is the caller's
    max_len: int
    pools: KvPools
    feature_layers: tuple[int, ...]

    @property
    def config(self) -> Any: ...

    @property
    def hidden_size(self) -> int:
        """The width of the states that `forward` returns and `logits` takes."""

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def lm_head(self) -> nn.Linear: ...

    def forward(self, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> States:
        """Run tokens [B, Q], or packed ones [M], at positions of that shape."""

    def prefill(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, last: LastRows | None = None) -> Prefilled:
        """Write the rows' KV, and return the features and the hidden states of the last rows alone."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] from hidden states [..., H]."""

    def commit_path(
        self,
        page_table: Tensor,
        path: Tensor,
        num_valid: Tensor,
        prefix_lens: Tensor,
        *,
        slots: Tensor,
        status: Tensor,
        window_tables: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Make the accepted path of each request's tree part of its cache."""

    def resize_pools(self, num_pages: int) -> None:
        """Replace the pools by empty ones with another number of pages."""

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """Return the updates by weights named as in its checkpoint; errors call them `name`."""

    def refresh(self) -> None:
        """Recompute parts that were derived from weights."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its own weights, which it may offload."""

    def sleep(self, level: int) -> None:
        """Drop the pools, and offload the weights to host memory (1) or drop them (2)."""

    def wake(self, level: int, num_pages: int) -> None:
        """Undo `sleep`, with empty pools; dropped weights are zeros."""


def implementation_of(config: Any, max_len: int, implementation: str = "auto", name: str = "model") -> str:
    """Return the backend, "native" or "transformers", for a config. Auto: native where our layers express the model.

    Raises:
        ValueError: no such implementation; native, for a model that our layers do not express.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"Engine: implementation is {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if not getattr(config, "num_attention_heads", None):
        if getattr(config, "sub_configs", None):
            raise ValueError(f"{name}: {config.model_type} is made of several models, expected one")
        raise ValueError(f"{name}: {config.model_type} has no attention in its layers, expected a model that has")
    if implementation != "auto":
        if implementation == "native":
            check_supported(config, max_len, name)
        return implementation
    try:
        check_supported(config, max_len, name)
    except ValueError:
        return "transformers"
    return "native"


def open_language_model(
    model: str | Path | nn.Module, options: ModelOptions, implementation: str = "auto"
) -> LanguageModel:
    """Load the model by the backend that `implementation_of` names.

    Raises:
        ValueError: what `implementation_of` and the backend refuse.
    """
    from .backends.transformers import TransformersLM  # here, since it stands on this module

    kind: type[CausalLM] | type[TransformersLM] = TransformersLM
    if implementation_of(config_of(model, options.name), options.max_len, implementation, options.name) == "native":
        kind = CausalLM
    return kind(model, options)


def windows_of(config: Any, implementation: str) -> set[int | None]:
    """Return the windows of a model's layers; None is among them if some layer sees all rows, or may.

    What modules of transformers see is only known when they run.
    """
    if implementation == "transformers":
        return {None, largest(config, "sliding_window")}
    family = family_of(config)
    return {family.window(layer) for layer in range(config.num_hidden_layers)}


class Way(NamedTuple):
    """How the parts of a model would run, in words."""

    implementation: str
    layers: str
    products: str
    experts: str | None
    windows: str
    features: str
    rounds: str


def way_of(model: str | Path, name: str = "model") -> Way:
    """Describe how an engine would run the model of a folder or hub id, by its config; no weights are read.

    Raises:
        ValueError: what `config_of` and `implementation_of` refuse.
    """
    config = config_of(model, name)
    implementation = implementation_of(config, 2, name=name)
    storage = storage_of(model, config)
    limited = sorted(window for window in windows_of(config, implementation) if window is not None)
    windows = ", ".join(f"the last {window} rows" for window in limited)
    count = config.num_hidden_layers
    if implementation == "native":
        if None in windows_of(config, implementation):
            windows = f"{windows} in some layers, all rows in others" if windows else "all rows in every layer"
        return Way(
            implementation,
            "native",
            storage.products,
            storage.experts,
            windows,
            f"states that enter any of {count} layers or leave the last",
            "captured as CUDA graphs",
        )
    return Way(
        implementation,
        "by transformers, with our attention; norms, products, gated parts, rotations and experts of ours where they "
        "compute the same; held to its own logits when an engine is made",
        storage.products,
        storage.experts,
        f"as its modules ask: {windows} or all" if windows else "as its modules ask",
        f"by hooks on its {count} layers",
        "captured as CUDA graphs where its code allows (Engine.not_captured says why not)",
    )
