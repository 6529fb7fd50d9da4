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
        head: folder or hub id of a language model with the layer, an `MtpHead`, or the tuple of those of a chain; None:
            the target's own checkpoint.
        num_steps, topk, num_nodes, sampled: as for `Eagle3`.
        vocabulary: as for `Eagle`.

    Raises:
        ValueError: as for `Eagle3`; a checkpoint without an MTP layer, or with several that are fewer than `num_steps`.
    """

    head: str | Path | MtpHead | tuple[MtpHead, ...] | None = None

    kind = MtpHead

    def check_head(self) -> None:
        is_chain = isinstance(self.head, tuple) and len(self.head) > 0
        if is_chain and all(isinstance(head, MtpHead) for head in self.head):  # type: ignore[union-attr]
            return
        if self.head is not None and not isinstance(self.head, str | Path | MtpHead):
            given = f"a {type(self.head).__name__}"
            raise ValueError(f"MTP: head is {given}, expected a folder, a hub id, an MtpHead, a tuple of these or None")

    @property
    def model_name(self) -> str:
        if self.head is None:
            return "target"
        return model_name(self.head[0] if isinstance(self.head, tuple) else self.head)

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
        layers = self.layers(target)
        config = layers[0].config
        num_layers = len(layers) * family_of(config_of_layers(config, 0, has_experts=False)).num_kv_layers
        needs = self.model_needs(config, num_layers, feature_layers=(target.num_hidden_layers,))
        return replace(
            needs,
            kv_numbers=needs.kv_numbers + (len(layers) - 1) * config.hidden_size,
            tensor_prefixes=() if self.head is not None else tuple(layer.prefix for layer in layers),
            lookahead=len(layers),
        )

    def layers(self, target: Any) -> list[MtpCheckpoint | MtpHead]:
        """Return the layers that draft, given the target's config: one for all steps, or of several one for each.

        Raises:
            ValueError: as the class.
        """
        found: list[MtpCheckpoint | MtpHead]
        if isinstance(self.head, MtpHead):
            found = [self.head]
        elif isinstance(self.head, tuple):
            found = list(self.head)
        else:
            checkpoint = self.checkpoint(target)
            found = [checkpoint.layer(index) for index in range(checkpoint.num_layers)]
        if 1 < len(found) < self.num_steps:
            raise ValueError(
                f"MTP: num_steps is {self.num_steps}, expected at most {len(found)} for a checkpoint with "
                f"{len(found)} MTP layers (each drafts one step)"
            )
        return found[: self.num_steps]

    def load_whole(self, context: DraftContext) -> DraftHead:
        sizes = {"num_pages": context.num_pages, "page_size": context.page_size}
        layers = self.layers(context.target.config)
        if len(layers) == 1:
            return load_mtp_head(layers[0], context.target, **sizes)
        return load_mtp_chain(layers, context.target, **sizes, page_refs=context.state.pool.page_refs)

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

    def checkpoint(self, target: Any) -> MtpCheckpoint:
        """Return the checkpoint of the layer, given the target's config."""
        assert not isinstance(self.head, MtpHead | tuple)
        source = self.head or target.name_or_path
        if not source:
            raise ValueError("MTP: head is None, expected a folder or hub id for a target that has none")
        return MtpCheckpoint.open(source)
