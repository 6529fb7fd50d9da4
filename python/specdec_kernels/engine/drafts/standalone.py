"""STANDALONE: a small model with the target's tokenizer. Draft row i is token i, so the draft is one row ahead."""

from __future__ import annotations

from torch import Tensor

from ...models.attention import Rows
from ...models.causal_lm import CausalLM
from ...ops import Accepted
from ..prefill import Prefill
from ..state import SlotState
from .model import ModelDraft


class StandaloneDraft(ModelDraft):
    position_offset = 1

    def __init__(
        self, state: SlotState, model: CausalLM, num_steps: int, topk: int, num_nodes: int, draws: bool = False
    ) -> None:
        super().__init__(state, num_steps, topk, num_nodes, draws)
        self.model = model
        if draws:
            self.keep_logits(model.embedding.weight.new_empty(1, model.config.vocab_size))

    @property
    def num_pool_bytes(self) -> int:
        return self.model.pools.num_bytes

    def resize_pools(self, num_pages: int) -> None:
        self.model.resize_pools(num_pages)

    def detach_pools(self) -> None:
        self.model.detach_pools()

    def prefix_lens(self) -> Tensor:
        return self.state.seq_lens + 1

    def step(self, tokens: Tensor, positions: Tensor, feature: Tensor | None, rows: Rows) -> tuple[Tensor, None]:  # type: ignore[override]
        return self.model.logits(self.model.forward(tokens, positions, rows)).flatten(0, 1), None

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        self.model.prefill(prefill.tokens, prefill.positions, prefill.rows)

    def activate(self, slots: Tensor) -> None:
        """The roots' own rows, which give the first children."""
        self._run(slots, self.state.root_tokens[slots][:, None], self.state.seq_lens, None)

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        self._run(slots, accepted.tokens[:, :num_nodes].clamp(min=0), self.state.seq_lens_before + 1, num_valid)

    def _run(self, slots: Tensor, tokens: Tensor, prefix_lens: Tensor, num_valid: Tensor | None) -> None:
        """Rows of tokens [B, Q] behind `prefix_lens`; the last valid one becomes the slots' draft state."""
        width = tokens.shape[1]
        rows = self.state.rows(slots, prefix_lens, tail_len=width, num_valid=num_valid)
        hidden = self.model.forward(tokens, self.positions_from(prefix_lens[slots], width), rows)
        if num_valid is None:
            self.set_root_children(slots.long(), self.model.logits(hidden[:, -1]))
            return
        last = hidden.flatten(0, 1)[self.last_valid(num_valid, width)]
        self.set_root_children(self.rows_to_keep(slots, num_valid), self.model.logits(last))
