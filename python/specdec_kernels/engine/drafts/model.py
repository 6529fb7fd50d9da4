"""Drafting with a model: expand the k best paths step by step, then keep the best nodes (EAGLE-2, arXiv 2406.16858).

`docs/round.md` fixes which token is in which row and at which position it is rotated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.families import kv_numbers
from ...models.heads.base import Features, HeadStorage
from ...models.layers.divided_logits import best_tokens
from ...models.layers.paged_batch import PagedBatch
from ...ops import (
    DraftExtendInputs,
    TopK,
    append_draft_backlog,
    draft_extend_inputs,
    expand_root,
    expand_tree,
    make_calibration,
    sample_draft,
)
from ..options import check_range
from .base import DraftBudget, DraftRequest
from .calibrated import CalibratedDraft
from .capabilities import Idleable, Migratable
from .context import DraftContext, DraftState
from .needs import AttentionCall, Needs
from .proposal import Committed, DrawnFrom, Proposal, makes_valid_trees, no_candidates

TILE_ROWS = 64  # of a draft step: a tile of `small_m_gemm`; fewer rows hardly take less time
# Rounds that a slot's draft can be idle. Each needs room for a row of features. Catching up with more rows at once
# costs less per row as long as reading the weights dominates.
MAX_IDLE_ROUNDS = 16
DEFAULT_NUM_NODES = 48  # of a tree
QUANTIZED = "fp8", "fp8-head"  # values of `draft_weights`
IN_8_BITS = "fp8_e4m3", torch.float8_e4m3fn  # values of `kv_dtype`
SEED_OF_ROUND = -0x61C8864680B583EB  # odd, 2^64 over the golden ratio: far from what seeds differ by


def seeds_of_round(state: DraftState) -> Tensor:
    """Return seeds [num_slots] int64 of the drafts of a round.

    Drafts of a rejected block are dropped, so their noise must not come back in the next round.
    """
    return torch.add(state.seeds, state.seq_lens, alpha=SEED_OF_ROUND)


def draw_tokens(
    state: DraftState, seeds: Tensor, slots: Tensor, logits: Tensor, depth: int, id_map: Tensor | None
) -> TopK:
    """Sample a token for each row of logits [B, Vd], `depth` positions after the root."""
    drawn: TopK = sample_draft(
        logits,
        1,
        seeds=seeds,
        positions=state.seq_lens[slots] + depth,
        temperature=state.temperature,
        slots=slots,
        id_map=id_map,
    )
    return drawn


def extend_rows(
    state: DraftState, slots: Tensor, committed: Committed, position_offset: int = 0
) -> tuple[DraftExtendInputs, PagedBatch]:
    """Return the rows of a committed round in a draft, and the batch of their pass over the draft's KV.

    `position_offset` is the number of KV rows that the draft has beyond those of the target.
    """
    lens = state.prefix_lens
    extend = draft_extend_inputs(
        committed.accepted.tokens,
        committed.accepted.path,
        committed.num_valid,
        lens,
        committed.num_nodes,
        slots=slots,
        cu_seqlens_q=committed.cu_seqlens,
        position_offset=position_offset,
    )
    rows = state.rows(
        slots,
        lens + position_offset if position_offset else lens,
        tail_len=extend.tokens.shape[1],
        max_kv_len=committed.max_kv_len,
        num_valid=committed.num_valid,
    )
    return extend, rows


def check_storage(name: str, draft_weights: str | None, kv_dtype: str | torch.dtype | None) -> None:
    """Raise a ValueError for a way to store a draft's weights or KV that there is not; `name` is the draft's."""
    if draft_weights not in (None, *QUANTIZED):
        raise ValueError(f"{name}: draft_weights is {draft_weights!r}, expected None, 'fp8' or 'fp8-head'")
    if kv_dtype not in (None, *IN_8_BITS):
        raise ValueError(f"{name}: kv_dtype is {kv_dtype!r}, expected None (that of the weights) or 'fp8_e4m3'")


def check_sampled(name: str, sampled: bool, topk: int | None) -> None:
    """Raise a ValueError for drafts that are drawn and branch, or for no bool; `name` is the draft's."""
    if not isinstance(sampled, bool):
        raise ValueError(f"{name}: sampled is {sampled!r}, expected True or False")
    if sampled and topk != 1:
        raise ValueError(f"{name}: sampled is True with topk={topk}, expected topk=1 (a chain can be drawn)")


def storage_of(draft: Any, context: DraftContext) -> HeadStorage:
    """Return how a draft's options `draft_weights` and `kv_dtype` store a head."""
    kv_dtype = None if draft.kv_dtype is None else torch.float8_e4m3fn
    return HeadStorage(draft.draft_weights, kv_dtype, context.state.window_pages)


@dataclass
class ModelDraft(CalibratedDraft, Idleable, Migratable):
    """The loop that EAGLE heads and standalone models share; they supply `step`, and `run_committed` for extending.

    Draft state, per slot: the root's k best children (ids, log-probabilities), ready before the round starts; prefill
    leaves none, since no first round asks for them. There is one row more than slots: empty rows of a batch (slot -1)
    read it, and rows that have nothing to keep write it.

    With `sampled` (and k = 1) children of requests that sample are drawn, for `verify_tree` to accept or reject as a
    block. Then the root's logits are kept instead, and its child is drawn in the round, where the request's parameters
    are known.

    An idle round appends the tokens and features that draft-extend would have read to the slot's backlog, a ring of
    MAX_IDLE_ROUNDS rows; `catch_up` is draft-extend over all of them.
    """

    _: KW_ONLY
    num_steps: int = 5
    topk: int = 8
    num_nodes: int | None = None
    sampled: bool = False

    position_offset = 0  # a depth-d node is rotated at L + position_offset + d - 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option in ("num_steps", "topk"):
            check_range(f"{name}: {option}", getattr(self, option), 1, 64)
        if self.num_nodes is not None:
            check_range(f"{name}: num_nodes", self.num_nodes, 1, 256)
        check_sampled(name, self.sampled, self.topk)

    # --- what a kind of model supplies

    def root_features(self, slots: Tensor, k: int) -> Features | None:
        """Return the features of the slots' B * k depth-1 nodes; None for models that read none."""
        return None

    @abstractmethod
    def step(
        self, depth: int, tokens: Tensor, positions: Tensor, features: Features | None, rows: PagedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Run frontier nodes [B, k], which are `depth` below the root, 1 and up.

        Returns:
            Logits [B * k, Vd], and their own features [B * k, H].
        """

    @abstractmethod
    def run_committed(self, extend: DraftExtendInputs, features: Tensor | None, rows: PagedBatch) -> None:
        """Run rows of committed tokens [B, W], with features [B * W, n * H] for models that read any.

        What follows the last row of each request becomes its slot's draft state (`set_root_children`).
        """

    # --- capabilities

    def save(self, slot: int) -> dict[str, Tensor]:
        if self.sampled:
            return {"root_logits": self.root_logits[slot]}
        return {"child_ids": self.child_ids[slot], "child_logprobs": self.child_logprobs[slot]}

    def restore(self, slot: int, saved: Mapping[str, Tensor]) -> None:
        for name, tensor in self.save(slot).items():
            tensor.copy_(saved[name])

    def catch_up(self, slots: Tensor, max_kv_len: int | None = None) -> None:
        num_kept = self.backlog_lens.clamp(max=MAX_IDLE_ROUNDS)
        begins = self._draft_lens(self.state.seq_lens - num_kept[:-1])
        counts, slot_rows = num_kept[slots], slots.long()
        rows = torch.arange(MAX_IDLE_ROUNDS, dtype=torch.int32, device=slots.device)
        batch = torch.arange(len(slots), device=slots.device)
        # Where the ring has overwritten rows, its oldest row is not at place 0.
        places = (self.backlog_lens - num_kept)[slots, None] + rows
        at = slot_rows[:, None], (places % MAX_IDLE_ROUNDS).long()
        extend = DraftExtendInputs(
            tokens=self.backlog_tokens[at],
            positions=begins[slots, None] + rows,
            node_rows=batch.new_empty(0),  # features have been gathered
            last_rows=batch * MAX_IDLE_ROUNDS + (counts - 1).clamp(min=0),
            kept_slots=torch.where(counts > 0, slot_rows, len(self.backlog_lens) - 1),
        )
        features = None if self.backlog_features is None else self.backlog_features[at].flatten(0, 1)
        # A stalled slot has pages for these rows, since it had them in the idle rounds: its status does not matter.
        of_slots = self.state.rows(slots, begins, MAX_IDLE_ROUNDS, max_kv_len=max_kv_len, num_valid=counts)
        self.run_committed(extend, features, of_slots._replace(status=None))
        self.backlog_lens[slots] = torch.zeros_like(counts)  # no value from the host: rounds are captured

    # --- before rounds

    def most_nodes(self) -> int:
        """Return the most nodes of a tree."""
        if self.num_nodes is not None:
            return self.num_nodes
        return self.num_steps + 1 if self.topk == 1 else DEFAULT_NUM_NODES

    def model_needs(
        self, config: Any, num_layers: int, *, feature_layers: tuple[int, ...] = (), follows_kv_dtype: bool = False
    ) -> Needs:
        """Return the needs of this loop over a model with this config."""
        width = self.num_steps + 1
        return Needs(
            num_nodes=self.most_nodes(),
            accept_width=width,
            feature_layers=feature_layers,
            scratch_rows=self.topk * (self.num_steps - 1) + 1,
            kv_numbers=kv_numbers(config, num_layers),
            attention=(
                AttentionCall.of(config, self.topk, follows_kv_dtype, num_layers * max(self.num_steps - 1, 1)),
                AttentionCall.of(config, width, follows_kv_dtype, num_layers),
            ),
            max_idle_rounds=MAX_IDLE_ROUNDS,
            num_steps=self.num_steps,
        )

    def open(self, context: DraftContext) -> None:
        slots, device = context.num_slots, context.device
        self.id_map: Tensor | None = None  # of the draft's ids to the target's
        self.child_ids = torch.zeros(slots + 1, self.topk, dtype=torch.int32, device=device)
        self.child_logprobs = torch.full((slots + 1, self.topk), -torch.inf, device=device)
        rows = torch.arange(-1, self.most_nodes() - 1, dtype=torch.int32, device=device)  # node i is drawn from row i-1
        self.calibration = make_calibration(self.num_steps, like=rows) if self.is_calibrated else None
        self._draft_rows = rows.where(rows < self.num_steps, -1).repeat(slots, 1)
        # Rows appended to each slot's backlog, those that the ring has overwritten included; the ring of their tokens,
        # and that of their features, where the model reads any.
        self.backlog_lens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.backlog_tokens = torch.zeros(slots + 1, MAX_IDLE_ROUNDS, dtype=torch.int32, device=device)
        self.backlog_features: Tensor | None = None

    def allocate_backlog_features(self, like: Tensor, width: int) -> None:
        """Allocate the ring of features [width] of idle rounds, if drafts resume."""
        if self.context.catches_up:
            self.backlog_features = like.new_zeros(*self.backlog_tokens.shape, width)

    def allocate_root_logits(self, like: Tensor) -> None:
        """Allocate the slots' logits [Vd] at their roots, in the shape of a row of `like`."""
        self.root_logits = like.new_full((len(self.child_ids), like.shape[-1]), -torch.inf)

    def begin(self, slot: int, request: DraftRequest) -> None:
        # There are no children until the first round yields them.
        self.child_logprobs[slot] = -torch.inf
        self.backlog_lens[slot] = 0
        if self.sampled:
            self.root_logits[slot] = -torch.inf

    # --- rounds

    def prefix_lens(self) -> Tensor:
        """Return [num_slots] draft rows committed before the round."""
        return self._draft_lens(self.state.seq_lens)

    def num_branches(self, batch: int, num_nodes: int) -> int:
        """Return k, the paths that each step expands: `topk` where rows cost nothing, else few for small trees.

        Nearly all of a small tree is the best path and the siblings of its first nodes, while each row of a step is a
        token of the draft: for 64 requests with 10 paths each, 4 steps are as much work as a fifth of a round. If the
        batch fills the tile by itself, and on a CPU, where every row costs, a tree no larger than a path is a path.
        """
        free = TILE_ROWS // batch if self.context.device.type == "cuda" else 0
        if free == 0 and num_nodes <= self.num_steps + 1:
            return 1
        return min(self.topk, max(free, -(-num_nodes // 4), 2))

    def set_root_children(self, rows: Tensor, logits: Any) -> None:
        """Rank or store logits [B, Vd] as these rows of the draft state."""
        if self.sampled:
            self.root_logits[rows] = logits
            return
        self.child_ids[rows], self.child_logprobs[rows] = best_tokens(logits, self.topk, self.id_map)

    @makes_valid_trees
    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        num_nodes, max_kv_len = budget
        if num_nodes == 1:
            return Proposal(no_candidates(slots))
        state, k = self.state, self.num_branches(len(slots), num_nodes)
        num_steps = min(self.num_steps, num_nodes - 1)  # no tree is deeper than its nodes in a row
        logits_of_steps: list[Tensor] = []  # [B, Vd] each, of drafts that are drawn
        seeds = seeds_of_round(state) if self.sampled else state.seeds

        def children(logits: Any) -> tuple[Tensor, Tensor]:
            if not self.sampled:
                return best_tokens(logits, k, self.id_map)
            logits_of_steps.append(logits)
            return draw_tokens(state, seeds, slots, logits, len(logits_of_steps), self.id_map)

        if self.sampled:
            self.child_ids[slots], self.child_logprobs[slots] = children(self.root_logits[slots])
        table = self.calibration_table
        candidates, frontier = expand_root(
            self.child_ids[:-1, :k].contiguous(),
            self.child_logprobs[:-1, :k].contiguous(),
            state.seq_lens,
            num_steps,
            slots=slots,
            position_offset=self.position_offset,
            calibration=table,
        )
        tokens, positions, features = frontier.tokens, frontier.positions, self.root_features(slots, k)
        prefix_lens = self.prefix_lens()
        for step in range(2, num_steps + 1):
            rows = state.rows(
                slots,
                prefix_lens,
                tail_len=(step - 1) * k,
                max_kv_len=max_kv_len,
                row_offset=(step - 2) * k,
                mask=frontier.mask,
            )
            logits, hidden = self.step(step - 1, tokens, positions, features, rows)
            ids, logprobs = children(logits)
            tokens, parent_rows, positions = expand_tree(
                ids.view(-1, k, k),
                logprobs.view(-1, k, k),
                step,
                candidates,
                frontier,
                state.seq_lens,
                slots=slots,
                position_offset=self.position_offset,
                calibration=table,
            )
            if hidden is not None:  # a chain's rows keep their order
                features = Features(hidden, None if k == 1 else parent_rows.flatten())
        if not self.sampled:
            return Proposal(candidates)
        draft_rows = self._draft_rows[: len(slots), :num_nodes].contiguous()
        return Proposal(candidates, DrawnFrom(torch.stack(logits_of_steps, 1), draft_rows, self.id_map))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        if committed.idle:
            self._append_backlog(slots, committed, features)
            return
        self.learn(committed)
        extend, rows = extend_rows(self.state, slots, committed, self.position_offset)
        # Features are gathered before anything is computed: S rows instead of N. Padded rows repeat a real one, and
        # write nowhere.
        self.run_committed(extend, None if features is None else features[extend.node_rows.flatten()], rows)

    def _append_backlog(self, slots: Tensor, committed: Committed, features: Tensor | None) -> None:
        if not self.context.catches_up:
            return
        append_draft_backlog(
            committed.accepted.tokens,
            committed.accepted.path,
            committed.num_valid,
            self.backlog_lens,
            self.backlog_tokens,
            features=features,
            backlog_features=self.backlog_features,
            slots=slots,
            cu_seqlens_q=committed.cu_seqlens,
        )

    def _draft_lens(self, lens: Tensor) -> Tensor:
        """Return the draft's rows for as many of the target's."""
        return lens + self.position_offset if self.position_offset else lens
