"""STANDALONE: a small model with the target's tokenizer. Draft row i is token i, so the draft is one row ahead."""

from __future__ import annotations

from torch import Tensor

from ...models.attention import Rows
from ...models.causal_lm import CausalLM
from ...ops import Accepted, extend_rows
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
        starts, tokens = self.state.seq_lens, self.state.root_tokens[slots]
        rows = self.state.rows(slots, starts, tail_len=1)
        hidden = self.model.forward(tokens[:, None], starts[slots][:, None], rows)
        self.set_root_children(slots.long(), self.model.logits(hidden[:, -1]))

    def extend(
        self, slots: Tensor, accepted: Accepted, num_valid: Tensor, features: Tensor | None, num_nodes: int
    ) -> None:
        before, offset = self.state.seq_lens_before, self.position_offset
        extend = extend_rows(
            accepted.tokens, accepted.path, num_valid, before, num_nodes, slots=slots, position_offset=offset
        )
        rows = self.state.rows(slots, before + offset, tail_len=extend.tokens.shape[1], num_valid=num_valid)
        hidden = self.model.forward(extend.tokens, extend.positions, rows).flatten(0, 1)
        self.set_root_children(extend.kept_slots, self.model.logits(hidden[extend.last_rows]))
