"""One speculative round, from the host's commands to the results it reads (docs/round.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _C
from ...models.language_model import LanguageModel
from ...models.layers.paged_batch import PagedBatch
from ...ops import (
    Accepted,
    NodeAllocation,
    PackedNodes,
    TokenScores,
    Tree,
    allocate_nodes,
    commit_tokens,
    edit_logits,
    mask_stops,
    pack_trees,
    score_tokens,
    verify_tree,
)
from ..drafts import Committed, Draft, DraftBudget, DrawnFrom, Needs, Proposal, ScoredTree
from ..drafts.base import has_equal_shares
from ..drafts.composition import catch_up
from ..drafts.proposal import propose, scored_tree_of
from .grammar_masks import TreeMasks
from .rings import Rings
from .state import EngineState

# Rows for which a GEMM takes about as long to multiply as to read its weight.
CHEAP_ROWS = 200
# A request may have this many times the mean number of nodes, to leave room for texts that differ. But as many are
# drafted for every request, and each level of a model's tree is a pass: where rows are few, trees have no more levels
# than the mean has rows, since a deeper one costs the whole batch more than it brings requests with easy text.
MOST_SHARE = 2


@dataclass(frozen=True)
class RoundResult:
    """The device tensors of one round's requests."""

    accepted: Accepted  # what was committed
    scores: TokenScores  # how likely it was
    num_nodes: Tensor  # [B], of each verified tree
    node_scores: Tensor  # [B, N], by which trees were cut
    shares: NodeAllocation


class Drafted(NamedTuple):
    """A round whose target has run, in this round or in prefill."""

    slots: Tensor
    proposal: Proposal
    tree: Tree  # cut to its shares
    scores: Tensor
    shares: NodeAllocation
    nodes: PackedNodes
    rows: PagedBatch
    hidden: Tensor  # [M, H]
    features: Tensor | None  # [M, F]
    idle: bool  # the draft, after it
    is_first: bool  # the target has run in prefill


def most_nodes(batch: int, num_rows: int, needs: Needs, equal: bool = False) -> int:
    """Return the most nodes to draft for one request of a round with `num_rows` rows in all.

    For a single request these are more than the round verifies: the nodes left out show what a larger round would gain.
    `equal`: all requests have the same number, as where drawn tokens would choose nodes.
    """
    if equal:
        return num_rows // batch
    each, most_left = num_rows // batch, num_rows - batch + 1
    share = each + 1 if each + 1 < needs.num_steps else MOST_SHARE * num_rows // batch
    return min(share, needs.num_nodes, *([most_left] if most_left <= max(needs.num_steps, 1) else []))


class Round:
    """The round that the host launches, as a graph or call by call; all it reads and writes keeps its address."""

    def __init__(
        self,
        target: LanguageModel,
        draft: Draft,
        state: EngineState,
        rings: Rings,
        *,
        reserve: int,
        needs: Needs,
        budget_levels: Mapping[int, Sequence[int]],
        masks: TreeMasks | None = None,
    ) -> None:
        """Take the draft's `needs`, and for each batch size the rows that its rounds may verify in all, increasing."""
        self.target, self.draft, self.state, self.rings = target, draft, state, rings
        self.reserve, self.needs, self.accept_width = reserve, needs, needs.accept_width
        self.equal_shares = has_equal_shares(draft, needs)
        self.masks = masks  # None: no request has a grammar
        self._drafted: Drafted | None = None
        # For each batch size, the most nodes of a request at each budget level.
        self.level_limits = {
            batch: [self.most_nodes(batch, total) for total in rows] for batch, rows in budget_levels.items()
        }
        # For each batch size, the levels [R] and these limits [R], padded with the last ones; empty if there is nothing
        # to choose.
        self._levels: dict[int, tuple[Tensor, Tensor]] = {}
        num_levels = max(map(len, budget_levels.values()))

        def padded(values: Sequence[int]) -> list[int]:
            return [*values, *[values[-1]] * (num_levels - len(values))]

        for batch, rows in budget_levels.items() if num_levels > 1 else ():
            both = padded(rows), padded(self.level_limits[batch])
            each = torch.tensor(both, dtype=torch.int32, device=state.seq_lens.device)
            self._levels[batch] = each[0], each[1]

    def reset(self) -> None:
        """Discard all rounds so far."""
        self.rings.reset()
        if self.masks is not None:
            self.masks.reset()

    def launch(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        """Apply the next record of commands, advance its first `batch` slots by one round and publish the results.

        With batch 0 only the record is applied. With `_C.CATCH_UP` for the rows the slots' draft catches up, and
        nothing is published. `_C.FIRST_ROUND` is the first round of slots that have been prefilled: the target has run
        over their roots. Other rounds verify `num_rows` nodes of any of the requests; the draft is idle in a round of
        one node for each. `max_kv_len` KV rows hold each slot's text with the reserve.
        """
        self.forward(batch, num_rows, max_kv_len)
        if num_rows != _C.CATCH_UP:
            self.finish(batch, num_rows, max_kv_len)

    @torch.inference_mode()
    def forward(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        """Run the part of `launch` up to the target's states of the drafted trees; `finish` runs the rest."""
        state, rings = self.state, self.rings
        rings.apply_commands(state)
        state.give_back(rings.given_back)
        if batch == 0:
            return
        slots = rings.slots[:batch]
        if num_rows == _C.CATCH_UP:
            catch_up(self.draft, slots, max_kv_len)
        else:
            self._drafted = self.run_target(slots, num_rows, max_kv_len)

    @torch.inference_mode()
    def finish(self, batch: int, num_rows: int, max_kv_len: int) -> None:
        """Run the rest of a `launch` after `forward` with the same arguments."""
        state, rings, slots = self.state, self.rings, self.rings.slots[:batch]
        drafted, self._drafted = self._drafted, None
        assert drafted is not None
        result = self.commit(drafted)
        _, level_limits = self._levels.get(batch, (None, None))
        by_scores = level_limits is not None and not self.equal_shares and num_rows != _C.FIRST_ROUND
        rings.publish_results(
            result.accepted,
            result.num_nodes,
            state,
            slots=slots,
            scores=result.scores,
            level_limits=level_limits,
            node_scores=result.node_scores if by_scores else None,
            cuts=result.shares.cuts if by_scores else None,
        )

    def most_nodes(self, batch: int, num_rows: int) -> int:
        """Return the most nodes to draft for one request of a round."""
        if num_rows == _C.FIRST_ROUND:
            return 1
        return most_nodes(batch, num_rows, self.needs, equal=self.equal_shares)

    def run_target(self, slots: Tensor, num_rows: int, max_kv_len: int | None = None) -> Drafted:
        """Draft for slots [B], and run the target over the trees; no device value is read on the host.

        In a first round the trees are the roots, each in the row of its slot whatever the batch: the slots have their
        pages, and the target's states at the roots.
        """
        state, draft, is_first = self.state, self.draft, num_rows == _C.FIRST_ROUND
        if not is_first:
            state.make_room(slots, self.reserve)

        most = self.most_nodes(len(slots), num_rows)
        num_rows = len(slots) if is_first else num_rows
        proposal = propose(draft, slots, DraftBudget(most, max_kv_len))
        tree, scores = scored_tree_of(proposal.drafts, slots, most, state)
        # In a batch-invariant round no request's number of nodes, nor the place of its rows, depends on others.
        equal = is_first or state.fixed_split is not None
        shares = self._equal_shares(slots, most) if equal else self.allocate_shares(scores, slots, num_rows)
        nodes = pack_trees(tree, scores, shares, num_rows)
        cu_seqlens = shares.cu_seqlens
        if self.masks is not None:
            self.masks.publish(tree, cu_seqlens, self.rings.num_applied)
        rows = state.rows(slots, state.seq_lens, max_kv_len=max_kv_len, mask=nodes.mask, cu_seqlens_q=cu_seqlens)
        if is_first:
            at = slots.clamp(min=0)
            hidden = state.last_hidden[at]
            features = state.last_features[at] if self.needs.feature_layers else None
        else:
            if equal and self.target.states is not None:  # a request with fewer nodes has rows without a node
                rows = rows.with_unused_rows(tree.num_nodes)
            hidden, features = self.target.forward(nodes.tokens, nodes.positions, rows)
        idle = num_rows == len(slots) and not is_first
        return Drafted(slots, proposal, tree, scores, shares, nodes, rows, hidden, features, idle, is_first)

    def commit(self, drafted: Drafted) -> RoundResult:
        """Verify what was drafted, and advance the slots; no device value is read on the host."""
        state, draft = self.state, self.draft
        slots, proposal, tree, scores, shares, nodes, rows, hidden, features, idle, is_first = drafted
        cu_seqlens, most = shares.cu_seqlens, tree.tokens.shape[1]
        allowed = None if self.masks is None else self.masks.allowed[: len(hidden)]
        drawn_from = proposal.drawn_from  # verified as a block, which asks for all logits
        if drawn_from is None and self._goes_by_depth(len(slots), len(hidden)):
            logits = self._logits_by_depth(hidden, tree, nodes, cu_seqlens, slots, allowed)
        else:
            logits = self._logits(hidden, nodes.positions, nodes.mask, tree, slots, allowed, cu_seqlens)
        accepted = self._verify(logits, tree, cu_seqlens, self.accept_width, slots, state.status, drawn_from)
        num_valid = commit_tokens(accepted, state, counts=state.edits.counts, slots=slots)
        token_scores = score_tokens(
            logits,
            accepted,
            top_n=self.rings.top_n,
            slots=slots,
            cu_seqlens_q=cu_seqlens,
            num_logprobs=state.num_logprobs,
        )
        if not is_first:  # else prefill has left the root's row in its place, and the root in recurrent states
            self.target.commit_path(
                rows.page_table,
                accepted.path,
                num_valid,
                state.prefix_lens,
                slots=slots,
                status=state.status,
                window_tables=rows.window_tables,
            )
        scored = ScoredTree(tree, scores)
        committed = Committed(accepted, num_valid, most, cu_seqlens, scored, rows.max_kv_len, idle)
        draft.extend(slots, committed, proposal, features)
        return RoundResult(accepted, token_scores, tree.num_nodes, scores, shares)

    def allocate_shares(self, scores: Tensor, slots: Tensor, num_rows: int) -> NodeAllocation:
        """Choose the best nodes of the whole batch for its budget, and find where each budget level would have cut."""
        state, batch = self.state, len(slots)
        budget_levels, level_limits = self._levels.get(batch, (None, None))
        return allocate_nodes(
            scores,
            num_rows,
            slots=slots,
            max_nodes=state.max_nodes,
            finish_reasons=state.finish_reasons,
            status=state.status,
            budget_levels=budget_levels,
            level_limits=level_limits,
        )

    def _equal_shares(self, slots: Tensor, most: int) -> NodeAllocation:
        """Allocate the same number of nodes to each request, at fixed rows, unless it wants fewer."""
        each = self.state.max_nodes[slots.clamp(min=0)].clamp(max=most)
        starts = torch.arange(0, (len(slots) + 1) * most, most, dtype=torch.int32, device=slots.device)
        no_cuts = torch.empty(0, device=slots.device)
        return NodeAllocation(each, starts, no_cuts, no_cuts)

    def _logits(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        tree: Tree,
        slots: Tensor,
        allowed: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return logits [*positions, V] of nodes [*positions, H] after the requests' edits.

        Stop tokens are masked where it is too early for them; `mask` holds the ancestors of each node.
        """
        state = self.state
        logits = self.target.logits(hidden)
        edit_logits(logits, mask, tree.tokens, state.edits, vocab_mask=allowed, slots=slots, cu_seqlens_q=cu_seqlens)
        mask_stops(logits, positions, state.stop_tokens, state.stops_from, slots=slots, cu_seqlens_q=cu_seqlens)
        return logits

    def _verify(
        self,
        logits: Tensor,
        tree: Tree,
        cu_seqlens: Tensor,
        width: int,
        slots: Tensor,
        status: Tensor | None,
        drawn_from: DrawnFrom | None = None,
    ) -> Accepted:
        """Walk down the trees, at most `width` nodes deep."""
        state = self.state
        return verify_tree(
            logits,
            tree,
            width,
            slots=slots,
            cu_seqlens_q=cu_seqlens,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
            seeds=state.seeds,
            **(drawn_from._asdict() if drawn_from else {}),
            block_verification=drawn_from is not None,
            status=status,
        )

    def _goes_by_depth(self, batch: int, num_rows: int) -> bool:
        """Return whether reading the LM head's weight once per depth costs less than multiplying all nodes by it."""
        return num_rows > self.accept_width * max(batch, CHEAP_ROWS)

    def _logits_by_depth(
        self,
        hidden: Tensor,
        tree: Tree,
        packed: PackedNodes,
        cu_seqlens: Tensor,
        slots: Tensor,
        allowed: Tensor | None,
    ) -> Tensor:
        """Return `_logits` of the nodes that the walks visit, computed depth by depth; other rows are undefined."""
        num_rows, most = len(hidden), tree.tokens.shape[1]
        logits = hidden.new_empty(num_rows + 1, self.target.lm_head.out_features)  # the last row is for empty ones
        logits[:, 0] = 0  # a walk ends at a node without its logits, which must still choose a token
        # torch copies rows element by element: 64 rows of a vocabulary take 51 us in 2-byte elements.
        whole = torch.int64 if logits.shape[-1] * logits.itemsize % 8 == 0 else logits.dtype
        out, logits = logits.view(whole), logits[:num_rows]
        first, is_empty = cu_seqlens[:-1].long(), cu_seqlens[1:] == cu_seqlens[:-1]
        nodes = first
        for depth in range(min(self.accept_width, most)):
            if depth > 0:  # a walk that has ended repeats its last node
                nodes = first + self._verify(logits, tree, cu_seqlens, depth + 1, slots, None).path[:, depth]
            rows = nodes.clamp(max=num_rows - 1)
            states, positions, mask = (part[rows][:, None] for part in (hidden, packed.positions, packed.mask))
            of_rows = None if allowed is None else allowed[rows][:, None]
            of_level = self._logits(states, positions, mask, tree, slots, of_rows)[:, 0]
            out[torch.where(is_empty, num_rows, nodes)] = of_level.view(whole)
        return logits
