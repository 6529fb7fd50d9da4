"""Drafting with a model: expand the k best paths step by step, then keep the best nodes (EAGLE-2, arXiv 2406.16858).

`docs/round.md` fixes which token stands in which row and where it is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.families import kv_numbers
from ...models.heads.base import DraftHead, Features
from ...models.kv_pools import KvPools
from ...models.language_model import LanguageModel
from ...models.layers.paged_batch import PagedBatch
from ...models.weights.update import Update
from ...ops import (
    DraftExtendInputs,
    append_draft_backlog,
    draft_extend_inputs,
    expand_root,
    expand_tree,
    make_calibration,
    sample_draft,
    select_topk,
    update_calibration,
)
from ..device.kv_buckets import AttentionCall
from .base import Draft, DraftBudget, DraftContext, DraftRequest, Needs
from .proposal import Committed, DrawnFrom, Proposal, no_candidates

TILE_ROWS = 64  # of a draft step: a tile of `small_m_gemm`, for which they take hardly longer than one
# Rounds that a slot may rest. Each needs room for a row of features; catching up with more rows at once costs less a
# row as long as reading the weights is most of it.
MAX_IDLE_ROUNDS = 16
MOST_NODES = 48  # of a tree, unless the caller says how many
SEED_OF_ROUND = -0x61C8864680B583EB  # odd, 2^64 over the golden ratio: far from what seeds differ by


@dataclass
class ModelDraft(Draft):
    """The loop that EAGLE heads and standalone models share; they supply `step` and feed `set_root_children`.

    Draft state, per slot: the root's k best children (ids, log-probabilities), ready before the round starts; prefill
    leaves none, since no first round asks for them. One row
    more, behind the slots, is what empty rows of a batch (slot -1) read, and rows that have nothing to keep write.

    With `sampled` (and k = 1) children of requests that sample are drawn, for `verify_tree` to accept or reject as a
    block. Then the root's logits are kept instead, and its child is drawn in the round, where the request's parameters
    are known.

    What the model says of its chosen candidates is calibrated by what becomes of them: path scores are products of
    calibrated probabilities. Rounds learn, but those of a batch-invariant engine, where the scores of one request would
    depend on the others.

    A round of rest keeps the tokens and features that draft-extend would have read, a row of a slot for each, in a ring
    of MAX_IDLE_ROUNDS; `catch_up` is draft-extend over all of them.
    """

    _: KW_ONLY
    num_steps: int = 5
    topk: int = 8
    num_nodes: int | None = None
    sampled: bool = False

    position_offset = 0  # a depth-d node is rotated at L + position_offset + d - 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option, high in (("num_steps", 64), ("topk", 64), ("num_nodes", 256)):
            value = getattr(self, option)
            if value is not None and not 1 <= value <= high:
                raise ValueError(f"{name}: {option} is {value}, expected 1 to {high}")
        if self.sampled and self.topk != 1:
            raise ValueError(f"{name}: sampled is True with topk={self.topk}, expected topk=1 (a chain can be drawn)")

    @property
    def model_name(self) -> str:
        """What its model is called, wherever its folder lies."""
        raise NotImplementedError

    @property
    def held(self) -> LanguageModel | DraftHead:
        """The model, with its pools, of an open draft."""
        raise NotImplementedError

    @property
    def pools(self) -> list[KvPools]:
        return [self.held.pools]

    def resize_pools(self, num_pages: int) -> None:
        self.held.resize_pools(num_pages)

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        return self.held.updates(weights, name)

    def refresh(self) -> None:
        self.held.refresh()

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.held.weights

    @property
    def is_given(self) -> bool:
        return self.held.is_given

    def sleep(self, level: int) -> None:
        self.held.sleep(level)

    def wake(self, level: int, num_pages: int) -> None:
        self.held.wake(level, num_pages)

    def nodes(self) -> int:
        """Most nodes of a tree."""
        if self.num_nodes is not None:
            return self.num_nodes
        return self.num_steps + 1 if self.topk == 1 else MOST_NODES

    def needs_of_model(
        self, config: Any, num_layers: int, *, feature_layers: tuple[int, ...] = (), follows_kv_dtype: bool = False
    ) -> Needs:
        width = self.num_steps + 1
        return Needs(
            num_nodes=self.nodes(),
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
        super().open(context)
        slots, device = context.num_slots, context.device
        self.id_map: Tensor | None = None  # of the draft's ids to the target's
        self.child_ids = torch.zeros(slots + 1, self.topk, dtype=torch.int32, device=device)
        self.child_logprobs = torch.full((slots + 1, self.topk), -torch.inf, device=device)
        rows = torch.arange(-1, self.nodes() - 1, dtype=torch.int32, device=device)  # node i is drawn from row i - 1
        self.calibration = None if self.sampled else make_calibration(self.num_steps, like=rows)
        self._draft_rows = rows.where(rows < self.num_steps, -1).repeat(slots, 1)
        # Of rows that were kept at rest: how many there are, and with them those that the ring has lost; their tokens,
        # and their features, where the draft reads any.
        self.num_kept = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.kept_tokens = torch.zeros(slots + 1, MAX_IDLE_ROUNDS, dtype=torch.int32, device=device)
        self.kept_features: Tensor | None = None

    def keep_features(self, like: Tensor, width: int) -> None:
        """Makes room for features [width] of rounds of rest, where anybody asks for them."""
        if self.context.catches_up:
            self.kept_features = like.new_zeros(*self.kept_tokens.shape, width)

    def keep_logits(self, like: Tensor) -> None:
        """Makes room for the slots' logits [Vd] behind the root, of which `like` has a row."""
        self.root_logits = like.new_full((len(self.child_ids), like.shape[-1]), -torch.inf)

    def begin_anew(self) -> None:
        if self.calibration is not None:
            untouched = make_calibration(self.num_steps, like=self.num_kept)
            for own, new in zip(self.calibration, untouched, strict=True):
                own.copy_(new)

    def begin(self, slot: int, request: DraftRequest) -> None:
        # No round has been: there are no children until the first one yields them.
        self.child_logprobs[slot] = -torch.inf
        self.num_kept[slot] = 0
        if self.sampled:
            self.root_logits[slot] = -torch.inf

    def prefix_lens(self) -> Tensor:
        """[num_slots] draft rows committed before the round."""
        return self._draft_lens(self.state.seq_lens)

    def branches(self, batch: int, num_nodes: int) -> int:
        """k, the paths that each step expands: `topk` where rows cost nothing, else few for small trees.

        Of a small tree nearly all is the best path and what stands beside its first nodes, while a row of a step is a
        token of the draft: for 64 requests with 10 paths each, 4 steps are as much work as a fifth of a round. Where a
        batch fills the tile by itself, and on a CPU, where every row is work, a tree no larger than a path is one.
        """
        free = TILE_ROWS // batch if self.context.device.type == "cuda" else 0
        if free == 0 and num_nodes <= self.num_steps + 1:
            return 1
        return min(self.topk, max(free, -(-num_nodes // 4), 2))

    def start(self, slots: Tensor, k: int) -> Features | None:
        """The features of the slots' B * k depth-1 nodes, for drafts that carry any."""
        return None

    def step(
        self, tokens: Tensor, positions: Tensor, features: Features | None, rows: PagedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B * k, Vd] of frontier nodes [B, k], and their own features [B * k, H]."""
        raise NotImplementedError

    def set_root_children(self, rows: Tensor, logits: Tensor) -> None:
        """Rank or keep logits [B, Vd] as these rows of the draft state."""
        if self.sampled:
            self.root_logits[rows] = logits
            return
        self.child_ids[rows], self.child_logprobs[rows] = select_topk(logits, self.topk, id_map=self.id_map)

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        num_nodes, max_kv_len = budget
        if num_nodes == 1:
            return Proposal(no_candidates(slots))
        state, k = self.state, self.branches(len(slots), num_nodes)
        num_steps = min(self.num_steps, num_nodes - 1)  # deeper than its nodes in a row no tree can be
        logits_of_steps: list[Tensor] = []  # [B, Vd] each, of drafts that are drawn
        # The drafts of a block that is rejected are thrown away: their noise must not come back in the next round.
        seeds = torch.add(state.seeds, state.seq_lens, alpha=SEED_OF_ROUND) if self.sampled else state.seeds

        def children(logits: Tensor) -> tuple[Tensor, Tensor]:
            if not self.sampled:
                return select_topk(logits, k, id_map=self.id_map)
            logits_of_steps.append(logits)
            positions = state.seq_lens[slots] + len(logits_of_steps)
            return sample_draft(
                logits,
                1,
                seeds=seeds,
                positions=positions,
                temperature=state.temperature,
                slots=slots,
                id_map=self.id_map,
            )

        if self.sampled:
            self.child_ids[slots], self.child_logprobs[slots] = children(self.root_logits[slots])
        table = None if self.calibration is None else self.calibration.table
        candidates, frontier = expand_root(
            self.child_ids[:-1, :k].contiguous(),
            self.child_logprobs[:-1, :k].contiguous(),
            state.seq_lens,
            num_steps,
            slots=slots,
            position_offset=self.position_offset,
            calibration=table,
        )
        tokens, positions, features = frontier.tokens, frontier.positions, self.start(slots, k)
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
            logits, hidden = self.step(tokens, positions, features, rows)
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
            if hidden is not None:  # a chain's rows stay where they are
                features = Features(hidden, None if k == 1 else parent_rows.flatten())
        if not self.sampled:
            return Proposal(candidates)
        draft_rows = self._draft_rows[: len(slots), :num_nodes].contiguous()
        return Proposal(candidates, DrawnFrom(torch.stack(logits_of_steps, 1), draft_rows, self.id_map))

    def follow(self, extend: DraftExtendInputs, features: Tensor | None, rows: PagedBatch) -> None:
        """Runs the model over rows of committed tokens [B, W], with features [B * W, n * H] where it reads any. What
        follows the last of each becomes its slot's draft state."""
        raise NotImplementedError

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        self.learn(committed)
        accepted, num_valid, num_nodes, cu_seqlens, _, max_kv_len = committed
        extend = draft_extend_inputs(
            accepted.tokens,
            accepted.path,
            num_valid,
            self.state.prefix_lens,
            num_nodes,
            slots=slots,
            cu_seqlens_q=cu_seqlens,
            position_offset=self.position_offset,
        )
        before = self._draft_lens(self.state.prefix_lens)
        tail_len = extend.tokens.shape[1]
        rows = self.state.rows(slots, before, tail_len, max_kv_len=max_kv_len, num_valid=num_valid)
        # Gathered before anything is computed: S rows instead of N. Padded rows repeat a real one, and are written
        # nowhere.
        self.follow(extend, None if features is None else features[extend.node_rows.flatten()], rows)

    def rest(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        if not self.context.catches_up:
            return
        accepted, num_valid, _, cu_seqlens, _, _ = committed
        append_draft_backlog(
            accepted.tokens,
            accepted.path,
            num_valid,
            self.num_kept,
            self.kept_tokens,
            features=features,
            backlog_features=self.kept_features,
            slots=slots,
            cu_seqlens_q=cu_seqlens,
        )

    def catch_up(self, slots: Tensor, max_kv_len: int | None = None) -> None:
        num_kept = self.num_kept.clamp(max=MAX_IDLE_ROUNDS)
        begins = self._draft_lens(self.state.seq_lens - num_kept[:-1])
        counts, slot_rows = num_kept[slots], slots.long()
        rows = torch.arange(MAX_IDLE_ROUNDS, dtype=torch.int32, device=slots.device)
        batch = torch.arange(len(slots), device=slots.device)
        # Where the ring has lost rows its first one stands amid it.
        places = (self.num_kept - num_kept)[slots, None] + rows
        at = slot_rows[:, None], (places % MAX_IDLE_ROUNDS).long()
        extend = DraftExtendInputs(
            tokens=self.kept_tokens[at],
            positions=begins[slots, None] + rows,
            node_rows=batch.new_empty(0),  # features have been gathered
            last_rows=batch * MAX_IDLE_ROUNDS + (counts - 1).clamp(min=0),
            kept_slots=torch.where(counts > 0, slot_rows, len(self.num_kept) - 1),
        )
        features = None if self.kept_features is None else self.kept_features[at].flatten(0, 1)
        # A stalled slot has pages for these rows, since it had them when it rested: its status is not asked.
        of_slots = self.state.rows(slots, begins, MAX_IDLE_ROUNDS, max_kv_len=max_kv_len, num_valid=counts)
        self.follow(extend, features, of_slots._replace(status=None))
        self.num_kept[slots] = torch.zeros_like(counts)  # no number of the host: rounds are captured

    def save(self, slot: int) -> dict[str, Tensor]:
        if self.sampled:
            return {"root_logits": self.root_logits[slot]}
        return {"child_ids": self.child_ids[slot], "child_logprobs": self.child_logprobs[slot]}

    def restore(self, slot: int, kept: Mapping[str, Tensor]) -> None:
        for name, tensor in self.save(slot).items():
            tensor.copy_(kept[name])

    def _draft_lens(self, lens: Tensor) -> Tensor:
        """Rows of the draft for as many of the target's."""
        return lens + self.position_offset if self.position_offset else lens

    def learn(self, committed: Committed) -> None:
        """What became of the candidates moves the calibration."""
        tree, scores = committed.tree
        if self.calibration is None or self.state.fixed_split is not None or tree.tokens.shape[1] == 1:
            return
        update_calibration(self.calibration, tree, scores, committed.accepted)
