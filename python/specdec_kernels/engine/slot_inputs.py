"""The state that the slot of a request gets when the request begins, apart from its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .logit_edits import LogitEdit
from .prompt_scores import PromptScores


class KvSource(Protocol):
    """KV rows that a request brings from another engine.

    Attributes:
        first_rows: by group of layers, the first row that there is.
        is_pending: whether the rows have not been written.
    """

    first_rows: Mapping[str, int]
    is_pending: bool

    def unpack(
        self, state: Any, target: Any, draft: Any, slot: Tensor, chunk: int, num_rows: int
    ) -> dict[str, Tensor] | None:
        """Write the rows to the slot's pages, once; see `transfer.kv_transfer.MigratedKv`."""


class SlotInputs(NamedTuple):
    """The inputs of a slot.

    Attributes:
        edit: the request's logit edits; None: there are none.
        prediction: tokens that its text may repeat.
        kv: rows that it brings; None: all rows are prefilled.
        scores: filled with those of the prompt's tokens; None: they are not scored.
        on_begin: called when the request gets its slot, each time.
    """

    edit: LogitEdit | None = None
    prediction: Sequence[int] = ()
    kv: KvSource | None = None
    scores: PromptScores | None = None
    on_begin: Callable[[], object] | None = None
