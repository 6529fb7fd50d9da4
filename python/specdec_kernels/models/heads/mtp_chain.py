"""Several multi-token-prediction (MTP) layers in a chain (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Row i of layer 0 predicts token i + 2 from token i + 1 and the target's state of position i. Row i of layer m predicts
token i + m + 2 from token i + m + 1 and row i's state in layer m - 1, so it depends on tokens 0 to i + m + 1. A node at
depth d after L committed rows has row L - 1 - m + d in layer m, and reads its parent's state in layer m - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kv_pools import KeyValueLayout, KvPools, LayerKv
from ..language_model import LanguageModel
from ..layers.paged_batch import PagedBatch
from ..weights.update import Update, expect_tensors
from .base import DraftHead, Features, HeadOutput
from .mtp import MtpCheckpoint, MtpHead, load_mtp_head

POOL_DIM = 128  # the widest row that pools of states have


class MtpRows(NamedTuple):
    """Committed rows as one layer has them.

    `skipped` counts rows that the layer does not have, since they would come before row 0, or that are in pages of the
    prefix cache, whose rows all layers have computed.
    """

    tokens: Tensor  # [B, W]
    positions: Tensor  # [B, W]
    batch: PagedBatch
    skipped: Tensor  # [B]


class MtpChain(DraftHead):
    """MTP layers in a chain: layer m predicts the tokens at depth m + 1.

    The states of all layers but the last are kept in pools, row by row as KV is: a layer reads there what the layer
    before it made of rows of earlier passes. `hidden` of its outputs has the states of these layers side by side.

    Args:
        heads: the layers, prepared over one target.
        page_refs: [num_pages] int32, the owners of each page; those of more than one are not written. None: no page
            has several.
    """

    name = "MTP"

    def __init__(self, heads: list[MtpHead], page_refs: Tensor | None = None) -> None:
        super().__init__(heads[0].config)
        self.heads = nn.ModuleList(heads)
        self.prefixes = tuple(head.prefix for head in heads)
        self.page_refs = page_refs
        pools = heads[0].pools
        half = heads[0].config.hidden_size // 2
        dim = gcd(half, POOL_DIM)
        layout = KeyValueLayout(half // dim, dim, dim)
        self.states = KvPools.allocate(
            [layout] * (len(heads) - 1), pools.num_pages, pools.page_size, pools.dtype, heads[0].fc.weight.device
        )

    @property
    def all_pools(self) -> list[KvPools]:
        """The pools of all layers, and those of the states."""
        return [*(head.pools for head in self._heads), self.states]

    @property
    def feature_size(self) -> int:
        return (len(self.heads) - 1) * self._hidden_size

    @property
    def _hidden_size(self) -> int:
        size: int = self.config.hidden_size
        return size

    @property
    def _heads(self) -> list[MtpHead]:
        return list(self.heads)  # type: ignore[arg-type]

    def resize_pools(self, num_pages: int) -> None:
        for head in self._heads:
            head.resize_pools(num_pages)
        self.states = self.states.with_pages(num_pages)

    def draft_among(self, ids: list[int]) -> None:
        for head in self._heads:
            head.draft_among(ids)
        self.register_buffer("id_map", self._heads[0].id_map, persistent=False)

    # --- weights

    @property
    def weights(self) -> dict[str, Tensor]:
        return {head.prefix + name: tensor for head in self._heads for name, tensor in head.weights.items()}

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        expect_tensors(weights, name)
        rest, updates = dict(weights), list[Update]()
        for head in self._heads:
            own = {key: rest.pop(key) for key in list(rest) if key.startswith(head.prefix)}
            if own:
                updates += head.updates(own, name)
        if rest:
            raise ValueError(f"{name} has {min(rest)}, expected names that begin with {' or '.join(self.prefixes)}")
        return updates

    def refresh(self) -> None:
        for head in self._heads:
            head.refresh()

    def sleep(self, level: int) -> None:
        for head in self._heads:
            head.sleep(level)
        self.states = self.states.with_pages(0)

    def wake(self, level: int, num_pages: int) -> None:
        for head in self._heads:
            head.wake(level, num_pages)
        self.states = self.states.with_pages(num_pages)

    # --- passes

    def join(self, features: Tensor) -> Tensor:
        return self._heads[0].join(features)

    def divide_logits(self) -> None:
        for head in self._heads:
            head.divide_logits()

    def logits(self, normed: Tensor) -> Any:
        """Return the logits of layer 0 [..., Vd] for its states [..., H]; further columns are not read."""
        return self._heads[0].logits(normed[..., : self._hidden_size].contiguous())

    def forward(
        self,
        tokens: Tensor,
        features: Features,
        positions: Tensor,
        batch: PagedBatch,
        only: Tensor | None = None,
        *,
        depth: int = 0,
    ) -> HeadOutput:
        """Run committed rows through all layers; `normed` is layer 0's."""
        assert depth == 0 and features.rows is None
        width, hidden, normed = tokens.shape[1], list[Tensor](), list[Tensor]()
        for layer, head in enumerate(self._heads):
            rows = self._rows_of(layer, tokens, positions, batch)
            if layer:
                features = Features(self._read(self.states.layers[layer - 1], rows))
            if layer == len(self.heads) - 1:
                head.prefill(rows.tokens, features, rows.positions, rows.batch)
                break
            output = head(rows.tokens, features, rows.positions, rows.batch)
            self._write(self.states.layers[layer], output.hidden, rows)
            if only is None:
                hidden.append(output.hidden)
                normed.append(output.normed)
            else:
                begins = only - only % width
                hidden.append(output.hidden[torch.maximum(only - rows.skipped[only // width], begins)])
                normed.append(output.normed[only])
        return HeadOutput(torch.cat(hidden, -1), normed[0])

    def prefill(self, tokens: Tensor, features: Features, positions: Tensor, batch: PagedBatch) -> None:
        self(tokens, features, positions, batch)

    def step(
        self, depth: int, tokens: Tensor, positions: Tensor, features: Features, rows: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        """Run nodes `depth` below the root through the layers whose drafts come after them."""
        size, logits = self._hidden_size, None
        hidden = features.table.new_zeros(tokens.numel(), self.feature_size)
        for layer, head in enumerate(self._heads[depth:], depth):
            columns = slice((layer - 1) * size, layer * size)
            of_parents = Features(features.table[:, columns].contiguous(), features.rows)
            batch = rows._replace(prefix_lens=(rows.prefix_lens - layer).clamp(min=0))
            output = head(tokens, of_parents, (positions - layer).clamp(min=0), batch, depth=depth)
            if layer == depth:
                logits = head.logits(output.normed)
            if layer < len(self.heads) - 1:
                hidden[:, layer * size : (layer + 1) * size] = output.hidden
        assert logits is not None
        return logits, hidden

    def _rows_of(self, layer: int, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> MtpRows:
        """Return committed rows [B, W] of layer 0 as another layer has them: as many rows earlier."""
        assert batch.num_valid is not None and batch.row_offset == 0
        if layer == 0:
            return MtpRows(tokens, positions, batch, torch.zeros_like(batch.num_valid))
        width = tokens.shape[1]
        skipped_of_slots = self._skipped_rows(layer, batch)
        prefix_lens = batch.prefix_lens - layer + skipped_of_slots
        slots = batch.slots.clamp(min=0)
        # A free slot may have a longer backlog than rows.
        skipped, starts = skipped_of_slots[slots], prefix_lens[slots].clamp(min=0)
        columns = torch.arange(width, dtype=torch.int32, device=tokens.device)
        places = (skipped[:, None] + columns).clamp(max=width - 1)
        return MtpRows(
            tokens.gather(1, places.long()),
            starts[:, None] + columns,
            batch._replace(
                prefix_lens=prefix_lens,
                num_valid=(batch.num_valid - skipped).clamp(min=0),
            ),
            skipped,
        )

    def _skipped_rows(self, layer: int, batch: PagedBatch) -> Tensor:
        """Return how many of the `layer` rows before each slot's prefix length [slots] are not to be computed."""
        rows = batch.prefix_lens[:, None] + torch.arange(-layer, 0, dtype=torch.int32, device=batch.prefix_lens.device)
        skipped = rows < 0
        if self.page_refs is not None:
            places = torch.div(rows, self.states.page_size, rounding_mode="floor")
            pages = batch.page_table.gather(1, places.clamp(0, batch.page_table.shape[1] - 1).long())
            skipped |= (pages >= 0) & (self.page_refs[pages.clamp(min=0).long()] > 1)
        return skipped.sum(1, dtype=torch.int32)

    def _read(self, states: LayerKv, rows: MtpRows) -> Tensor:
        """Return the states [B * W, H] of these rows; those of rows that are not valid have no meaning."""
        batch, page_size = rows.batch, states.pools[0].shape[1]
        table = batch.page_table[batch.slots.clamp(min=0)]
        places = torch.div(rows.positions, page_size, rounding_mode="floor").clamp(max=table.shape[1] - 1)
        pages = table.gather(1, places.long()).clamp(min=0).long()
        offsets = (rows.positions % page_size).long()
        halves = [pool[pages, offsets].flatten(2) for pool in states.pools]
        return torch.cat(halves, -1).flatten(0, 1)

    def _write(self, states: LayerKv, hidden: Tensor, rows: MtpRows) -> None:
        heads, dim = states.pools[0].shape[2:]
        halves = hidden.view(*rows.tokens.shape, 2, heads, dim)
        rows.batch.write(states, halves[:, :, 0].contiguous(), halves[:, :, 1].contiguous())


def load_mtp_chain(
    sources: Sequence[MtpCheckpoint | MtpHead],
    target: LanguageModel,
    *,
    num_pages: int,
    page_size: int,
    page_refs: Tensor | None = None,
) -> MtpChain:
    """Return the chain of these layers, 2 or more; see `load_mtp_head`."""
    heads = [load_mtp_head(source, target, num_pages=num_pages, page_size=page_size) for source in sources]
    return MtpChain(heads, page_refs)
