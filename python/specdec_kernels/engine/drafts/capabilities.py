"""Capabilities of drafts beyond `Draft`: a class for each capability, from which drafts that have it inherit too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ...models.kv_pools import KvPools
from ...models.weights.update import Update


class Idleable(ABC):
    """A draft that may be idle, up to `Needs.max_idle_rounds` rounds, where drafting does not pay.

    In a round with `Committed.idle` nothing was drafted, and its `extend` may leave out all work but to keep the round
    in a backlog.
    """

    @abstractmethod
    def catch_up(self, slots: Tensor, max_kv_len: int | None = None) -> None:
        """Work off the backlog of slots [B], so that they are as if no round had been idle.

        Comes before the first `propose` that asks for candidates, and for a slot that wants drafts at the latest after
        `Needs.max_idle_rounds` idle rounds. `max_kv_len` is as in `DraftBudget`.
        """


class Migratable(ABC):
    """A draft that keeps more of a slot between rounds than rows of its pools and what `begin` makes of the text."""

    @abstractmethod
    def save(self, slot: int) -> dict[str, Tensor]:
        """Return what it keeps of a slot between two rounds, except for rows of its pools, after `catch_up`.

        These are views whose shapes are the same for every slot. A tensor whose name ends in `_ids` holds tokens; the
        engine that receives it checks them.
        """

    @abstractmethod
    def restore(self, slot: int, saved: Mapping[str, Tensor]) -> None:
        """Go on, after `begin`, from what `save` returned elsewhere, instead of `prefill` and `activate`.

        The rows of its pools are there.
        """


class Learner(ABC):
    """A draft that learns from the texts of requests."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was learned from warm-up rounds. No slot has a request, and captured rounds stay valid."""


class HasPools(ABC):
    """A draft with KV pools of its own, with pages as the target's."""

    @property
    @abstractmethod
    def pools(self) -> list[KvPools]:
        """The pools; the engine plans memory for more pages by these."""

    @abstractmethod
    def resize_pools(self, num_pages: int) -> None:
        """Replace `pools` by empty ones with another number of pages."""


class HasWeights(ABC):
    """A draft with weights that can be updated and offloaded.

    Attributes:
        tensor_prefixes: of its tensors' names in the target's checkpoint; none: its checkpoint is its own.
    """

    @property
    def tensor_prefixes(self) -> tuple[str, ...]:
        return ()

    @property
    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights that `sleep` offloads: none of a module that its user passed."""

    @property
    @abstractmethod
    def is_given(self) -> bool:
        """Whether its user passed a module, which owns the weights."""

    @abstractmethod
    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """Check new weights, named as in its checkpoint, and return what to write where. Change nothing yet.

        Errors call the mapping `name`.

        Raises:
            TypeError, ValueError: a tensor that is no weight of this draft, or cannot replace one.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Recompute what was derived from weights, the target's or its own, after they changed in place.

        No slot has a request.
        """

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free the memory of pools and weights: level 1 keeps weights in host memory, level 2 drops them.

        No slot has a request.
        """

    @abstractmethod
    def wake(self, level: int, num_pages: int) -> None:
        """Undo `sleep`, with empty pools; weights that were dropped are zeros."""
