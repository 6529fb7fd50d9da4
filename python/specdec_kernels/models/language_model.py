"""The interface of a language model over paged KV, as the engine, its drafts and its benchmarks use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .cache_division import CacheDivision
from .kv_pools import KvPools
from .layers.paged_batch import LastRows, PagedBatch
from .state_cache import StateCache
from .weights.update import Update


class States(NamedTuple):
    """The result of a forward pass for its rows."""

    hidden: Tensor  # [*tokens, H], after the final norm
    features: Tensor | None  # [*tokens, len(feature_layers) * H], concatenated; None: there are no feature layers


class Prefilled(NamedTuple):
    """The result of a prefill."""

    hidden: Tensor | None  # [R, H], after the final norm, of the last rows; None: no last rows were asked for
    features: Tensor | None  # as in `States`, of all rows
    all_hidden: Tensor | None = None  # [T, H], after the final norm, of all rows; None: they were not asked for


class LanguageModel(Protocol):
    """A causal language model over KV pools of its own."""

    model: Any  # the module of transformers
    is_given: bool  # whether that is the caller's
    max_len: int
    pools: KvPools
    states: StateCache | None  # None: no layer keeps a recurrent state
    feature_layers: tuple[int, ...]
    caches: CacheDivision | None  # None: the model is whole

    @property
    def config(self) -> Any: ...

    @property
    def hidden_size(self) -> int:
        """Return the width of the states that `forward` returns and `logits` takes."""

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def lm_head(self) -> nn.Linear: ...

    def forward(self, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> States:
        """Run tokens [B, Q], or packed ones [M], at positions of that shape."""

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        last: LastRows | None = None,
        *,
        all_rows: bool = False,
    ) -> Prefilled:
        """Write the rows' KV, and return the features, and the hidden states of the last rows.

        With `all_rows` also return the hidden states of all rows; those of the last ones are the same bits as without.
        """

    def expands_latents(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Return whether `prefill` is cheaper with `PagedBatch.latent_blocks`.

        `chunks`: of each request, how many KV rows come before its rows in the pass, and how many these are.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] for hidden states [..., H]."""

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

    def begin(self, slot: int) -> None:
        """Let the next pass of a slot begin a sequence."""

    def resize_pools(self, num_pages: int) -> None:
        """Replace the pools by empty ones of another number of pages."""

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """Return the updates by weights that are named as in its checkpoint; errors call the mapping `name`."""

    def refresh(self) -> None:
        """Recompute, in place, what was made of weights."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the weights that may be offloaded."""

    def sleep(self, level: int) -> None:
        """Drop the pools, and offload the weights to host memory (1) or drop them (2)."""

    def wake(self, level: int, num_pages: int) -> None:
        """Undo `sleep`, with empty pools; weights that were dropped are zeros."""
