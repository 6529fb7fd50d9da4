"""EAGLE, EAGLE3: a draft head over the target's states. Draft row i pairs token i+1 with the feature of position i."""

from __future__ import annotations

from torch import Tensor

from ...models.attention import Rows
from ...models.draft_head import DraftHead, Features, HeadOutput
from ...ops import Accepted, extend_rows
from ..prefill import Prefill
from ..state import SlotState
from .model import ModelDraft


class EagleDraft(ModelDraft):
    def __init__(
        self, state: SlotState, head: DraftHead, num_steps: int, topk: int, num_nodes: int, draws: bool = False
    ) -> None:
        super().__init__(state, num_steps, topk, num_nodes, draws)
        self.head = head
        self.id_map = head.id_map
        # The head's output at each slot's last committed row, and one for slot -1: the feature all depth-1 nodes share.
        like = head.pools.k
        self.last_hidden = like.new_zeros(len(state.seq_lens) + 1, head.config.hidden_size)
        if draws:
            self.keep_logits(head.logits(self.last_hidden[:1]))

    @property
    def num_pool_bytes(self) -> int:
        return self.head.pools.num_bytes

    def resize_pools(self, num_pages: int) -> None:
        self.head.resize_pools(num_pages)

    def start(self, slots: Tensor) -> Features:
        return Features(self.last_hidden, slots[:, None].expand(-1, self.topk).flatten().contiguous())

    def step(self, tokens: Tensor, positions: Tensor, features: Features | None, rows: Rows) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert features is not None
        hidden, normed = self.head(tokens, features, positions, rows)
        return self.head.logits(normed), hidden

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        assert features is not None
        joined = Features(self.head.join(features).flatten(0, 1))
        output = self.head(prefill.next_tokens, joined, prefill.positions, prefill.rows, only=prefill.last_rows)
        self._keep(prefill.slots.long(), output)

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        assert features is not None
        before = self.state.seq_lens_before
        extend = extend_rows(accepted.tokens, accepted.path, num_valid, before, num_nodes, slots=slots)
        rows = self.state.rows(slots, before, tail_len=extend.tokens.shape[1], num_valid=num_valid)
        # Gather before `fc`: S rows instead of N. Padded rows repeat a real one and are written nowhere.
        joined = Features(self.head.join(features.flatten(0, 1)[extend.node_rows.flatten()]))
        output = self.head(extend.tokens, joined, extend.positions, rows, only=extend.last_rows)
        self._keep(extend.kept_slots, output)

    def _keep(self, rows: Tensor, output: HeadOutput) -> None:
        """An output of a row for each becomes these rows of the draft state: children, and the feature they share."""
        self.set_root_children(rows, self.head.logits(output.normed))
        self.last_hidden[rows] = output.hidden
