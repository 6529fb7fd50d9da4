"""MTP: the multi-token-prediction layers that a target ships with draft.

Rows are those of an EAGLE head: row i pairs token i+1 with the state of position i. Further layers are a chain
(`MtpChain`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.families import family_of
from ...models.heads.base import DraftHead
from ...models.heads.mtp import MtpCheckpoint, MtpHead, config_of_layers, load_mtp_head
from ...models.heads.mtp_chain import MtpChain, load_mtp_chain
from ...models.kv_pools import KvPools
from ...models.layers.paged_batch import PagedBatch
from ...models.weights.model_config import model_name
from ...ops import DraftExtendInputs
from .context import DraftContext
from .eagle import FrequentTokensDraft
from .needs import Needs


@dataclass
class MTP(FrequentTokensDraft):
    """Drafts with a multi-token-prediction (MTP) layer, such as GLM-4.5's or MiMo's (docs/heads.md).

    One layer is applied once for each step. If the checkpoint has several, each drafts one step, and a text has no
    drafts until it has more than `num_steps` tokens.

    Args:
        head: folder or hub id of a language model with the layer, or an `MtpHead`; None: the target's own checkpoint.
        num_steps, topk, num_nodes, sampled: as for `Eagle3`.
        vocabulary: as for `Eagle`.

    Raises:
        ValueError: as for `Eagle3`; a checkpoint without an MTP layer, or with several that are fewer than `num_steps`.
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
    def tensor_prefixes(self) -> tuple[str, ...]:
        if self.head is not None or not self.is_open:
            return ()
        return self.module.prefixes if isinstance(self.module, MtpChain) else (self.module.prefix,)

    @property
    def pools(self) -> list[KvPools]:
        return self.module.all_pools if isinstance(self.module, MtpChain) else super().pools

    def needs(self, target: Any) -> Needs:
        self.check_vocabulary(target.vocab_size)
        source = self.source(target)
        num_chained = self.num_chained(source)
        num_layers = num_chained * family_of(config_of_layers(source.config, 0, has_experts=False)).num_kv_layers
        needs = self.model_needs(source.config, num_layers, feature_layers=(target.num_hidden_layers,))
        return replace(
            needs,
            kv_numbers=needs.kv_numbers + (num_chained - 1) * source.config.hidden_size,
            tensor_prefixes=self.prefixes_in_target(source),
            lookahead=num_chained,
        )

    def prefixes_in_target(self, source: MtpCheckpoint | MtpHead) -> tuple[str, ...]:
        """Return the prefixes of the layers in the target's checkpoint; none if they are in another."""
        if self.head is not None:
            return ()
        assert isinstance(source, MtpCheckpoint)
        return tuple(source.layer(index).prefix for index in range(self.num_chained(source)))

    def num_chained(self, source: MtpCheckpoint | MtpHead) -> int:
        """Return how many layers draft: one for all steps, or of several one for each step."""
        num_layers = source.num_layers if isinstance(source, MtpCheckpoint) else 1
        if 1 < num_layers < self.num_steps:
            raise ValueError(
                f"MTP: num_steps is {self.num_steps}, expected at most {num_layers} for a checkpoint with "
                f"{num_layers} MTP layers (each drafts one step)"
            )
        return 1 if num_layers == 1 else self.num_steps

    def load_whole(self, context: DraftContext) -> DraftHead:
        sizes = {"num_pages": context.num_pages, "page_size": context.page_size}
        source = self.source(context.target.config)
        num_chained = self.num_chained(source)
        if num_chained == 1:
            return load_mtp_head(source, context.target, **sizes)
        assert isinstance(source, MtpCheckpoint)
        page_refs = context.state.pool.page_refs
        return load_mtp_chain(source, num_chained, context.target, **sizes, page_refs=page_refs)

    def run_committed(self, extend: DraftExtendInputs, features: Tensor | None, rows: PagedBatch) -> None:
        super().run_committed(extend, features, rows)
        if not isinstance(self.module, MtpChain):
            return
        # Some layer has no row of the root yet, so a text that is shorter gets no drafts.
        assert rows.num_valid is not None
        lens = rows.prefix_lens[rows.slots.clamp(min=0)] + rows.num_valid
        is_short = (lens < len(self.module.heads))[:, None]
        children = self.root_logits if self.sampled else self.child_logprobs
        children[extend.kept_slots] = children[extend.kept_slots].masked_fill(is_short, -torch.inf)

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
