"""The changes that `specdec doctor` tries of an MTP layer: other readings of its layout, and of its norms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine import MTP, Draft
from ..models.heads.mtp import MtpCheckpoint
from .doctor_shifts import Shift, row_shifts

NORM = re.compile(r".*norm\.weight")


@dataclass(frozen=True)
class OffsetNorms(MtpCheckpoint):
    """A checkpoint whose norms have other weights than are stored.

    Attributes:
        by: what is added to them.
    """

    by: float = 0

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        return {name: tensor + self.by if NORM.fullmatch(name) else tensor for name, tensor in tensors.items()}


@dataclass
class ChangedMtp(MTP):
    """An MTP draft that reads its checkpoint in another way."""

    change: Callable[[MtpCheckpoint], MtpCheckpoint] = lambda checkpoint: checkpoint

    def checkpoint(self, target: Any) -> MtpCheckpoint:
        return self.change(super().checkpoint(target))


def mtp_shifts(folder: Path | None, num_steps: int, target: Any) -> Iterator[Shift]:
    """Yield all changes of an MTP layer in a folder, None: the target's; `target` is the target's config."""

    def changed(change: Callable[[MtpCheckpoint], MtpCheckpoint]) -> Callable[[], Draft]:
        return lambda: ChangedMtp(folder, num_steps=num_steps, topk=1, change=change)

    def relaid(**values: Any) -> Callable[[], Draft]:
        return changed(lambda checkpoint: replace(checkpoint, layout=replace(checkpoint.layout, **values)))

    def offset(by: float) -> Callable[[], Draft]:
        return changed(lambda c: OffsetNorms(**{**vars(c), "by": by}))

    try:
        layout = MTP(folder).checkpoint(target).layout
    except ValueError:  # the unchanged draft is refused, too
        return
    halves = ("the state, then the embedding", "the embedding, then the state")
    yield Shift(
        "order",
        f"the projection reads {halves[layout.state_first]}",
        f"exchange the halves of the columns of {layout.projection}.weight",
        relaid(state_first=not layout.state_first),
    )
    yield Shift(
        "norm",
        "the norms of embedding and state exchanged",
        f"exchange {layout.embedding_norm}.weight and {layout.state_norm}.weight",
        relaid(embedding_norm=layout.state_norm, state_norm=layout.embedding_norm),
    )
    for name, whose in (("reads_normed_state", "target's"), ("passes_normed_state", "layer's")):
        side = "before" if getattr(layout, name) else "after"
        yield Shift(
            "state",
            f"the {whose} {side} its final norm",
            f"MtpLayout.{name}: {not getattr(layout, name)}",
            relaid(**{name: not getattr(layout, name)}),
        )
    for by, how in ((1, "less one"), (-1, "plus one")):
        yield Shift(
            "norm",
            f"weights were stored {how}",
            f"{'add 1 to' if by > 0 else 'subtract 1 from'} the weights of the layer's norms",
            offset(by),
        )
    yield from row_shifts(lambda: MTP(folder, num_steps=num_steps, topk=1))
