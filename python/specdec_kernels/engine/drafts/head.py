"""The option `head` of drafts with a head: its types, its name, and where its tensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ...models.heads.base import DraftHead
from ...models.heads.checkpoint import HeadCheckpoint
from ...models.weights.model_config import model_name


class HasHead:
    """A draft with a head: a folder, a hub id, a part of a checkpoint, or a module of class `kind`."""

    kind: ClassVar[type[DraftHead]]
    head: Any

    def check_head(self) -> None:
        """Raise a ValueError for a head of another type than the class takes."""
        if not isinstance(self.head, str | Path | HeadCheckpoint | self.kind):
            name, kind = type(self).__name__, self.kind.__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            given = f"a {type(self.head).__name__}"
            raise ValueError(f"{name}: head is {given}, expected a folder, a hub id or {article} {kind}")

    @property
    def model_name(self) -> str:
        """The name of the head, wherever the folder is."""
        return model_name(self.head.source if isinstance(self.head, HeadCheckpoint) else self.head)

    @property
    def tensor_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the head's tensors in the target's checkpoint; none: its checkpoint is its own."""
        prefix = self.head.prefix if isinstance(self.head, HeadCheckpoint) else ""
        return (prefix,) if prefix else ()
