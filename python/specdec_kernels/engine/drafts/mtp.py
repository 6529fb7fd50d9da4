"""MTP: the multi-token-prediction layer that a target ships with drafts.

Rows are those of an EAGLE head: row i pairs token i+1 with the state of position i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.families import family_of
from ...models.heads.mtp import MtpCheckpoint, MtpHead, config_of_layers, load_mtp_head
from ...models.weights.model_config import model_name
from .context import DraftContext
from .eagle import FrequentTokensDraft
from .needs import Needs


@dataclass
class MTP(FrequentTokensDraft):
    """Drafts with a multi-token-prediction (MTP) layer, such as GLM-4.5's or MiMo's (docs/heads.md).

    The layer is applied once for each step.

    Args:
        head: folder or hub id of a language model with the layer, or an `MtpHead`; None: the target's own checkpoint.
        num_steps, topk, num_nodes, sampled: as for `Eagle3`.
        vocabulary: as for `Eagle`.

    Raises:
        ValueError: as for `Eagle3`; a checkpoint without an MTP layer, or with several.
    """

    head: str | Path | MtpHead | None = None

    kind = MtpHead

    def check_head(self) -> None:
        if self.head is not None and not isinstance(self.head, str | Path | MtpHead):
            given = f"a {type(self.head).__name__}"
            raise ValueError(f"MTP: head is {given}, expected a folder, a hub id, an MtpHead or None")

    @property
    def model_name(self) -> str:
        return "target" if self.head is None else model_name(self.head)

    @property
    def tensor_prefix(self) -> str:
        return self.module.prefix if self.head is None and self.is_open else ""

    def needs(self, target: Any) -> Needs:
        self.check_vocabulary(target.vocab_size)
        source = self.source(target)
        num_layers = family_of(config_of_layers(source.config, has_experts=False)).num_kv_layers
        needs = self.model_needs(source.config, num_layers, feature_layers=(target.num_hidden_layers,))
        return replace(needs, tensor_prefixes=(source.prefix,) if self.head is None else ())

    def load_whole(self, context: DraftContext) -> MtpHead:
        sizes = {"num_pages": context.num_pages, "page_size": context.page_size}
        return load_mtp_head(self.source(context.target.config), context.target, **sizes)

    def source(self, target: Any) -> MtpCheckpoint | MtpHead:
        """Return where the layer is, given the target's config."""
        return self.head if isinstance(self.head, MtpHead) else self.checkpoint(target)

    def checkpoint(self, target: Any) -> MtpCheckpoint:
        """Return the checkpoint of the layer, given the target's config."""
        assert not isinstance(self.head, MtpHead)
        source = self.head or target.name_or_path
        if not source:
            raise ValueError("MTP: head is None, expected a folder or hub id for a target that has none")
        return MtpCheckpoint.open(source)
