"""Measure how much of a text a draft predicts: a chain of drafts after every token, all in one pass per draft step.

The text is the target's own greedy output, so a round accepts drafts as long as they equal the text. The number of
right drafts after each token (of a tree, those of its best path) covers every round that an engine could run. Walking
over it, from a root to the token after the last right draft, gives the accept length of an engine that drafts a chain
(`topk=1`), without generating anything. All entries together, whether or not a round starts there, give the acceptance
by depth.

Drafts are called through the interface of rounds, so this module knows no algorithm. Each token of a text is the root
of a slot. The slots share the KV rows of the text and have rows of their own after them, with pages of one row. Drafts
of several MTP layers also write over the last rows before the root, so each slot has copies of these. An n-gram index
finds what precedes a slot's own root, and no other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine import Committed, Draft, DraftBudget, DraftContext, DraftRequest, Engine, Needs, SamplingParams
from ..engine.device.prefill import Prefill
from ..engine.device.state import EngineState
from ..engine.drafts.composition import close_draft, open_draft, pools_of, walk
from ..engine.drafts.proposal import ScoredTree, scored_tree_of
from ..engine.startup import forget
from ..models.kv_pools import KvPools
from ..models.language_model import LanguageModel
from ..models.layers.paged_batch import PagedBatch
from ..ops import Accepted, Tree


class Recorder(Draft):
    """A draft that proposes nothing and makes the engine record the inputs of these layers of the target."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=1, accept_width=1, feature_layers=self.layers)


class Text(NamedTuple):
    """A prompt and the target's own continuation of it."""

    prompt: list[int]
    tokens: list[int]  # of both
    features: Tensor  # [len(tokens), layers, H]: inputs of the recorder's layers


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of one draft over all texts.

    Attributes:
        rounds: an engine's rounds of each text.
        tokens: tokens that the rounds of each text emit.
        right: for each depth from 1 on, right drafts in chains from every token.
        reached: for each depth, drafts whose predecessors are right.
        covered: share of the target's tokens that the draft vocabulary has; None if that is the target's.
    """

    rounds: list[int]
    tokens: list[int]
    right: list[int]
    reached: list[int]
    covered: float | None = None

    @property
    def accept_length(self) -> float:
        return sum(self.tokens) / max(sum(self.rounds), 1)

    @property
    def by_depth(self) -> list[float]:
        """Acceptance rate at each depth: the share of right drafts among those whose predecessors are right."""
        return [right / max(reached, 1) for right, reached in zip(self.right, self.reached, strict=True)]


def write_texts(engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return each prompt with the target's greedy continuation."""
    outputs = engine.generate([list(prompt) for prompt in prompts], SamplingParams(max_new_tokens))
    return [[*prompt, *output.tokens] for prompt, output in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def record(engine: Engine, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[Text]:
    """Return the texts with the target's states. The engine must be idle: its KV rows are overwritten."""
    target, recorded = engine.target, []
    for prompt, tokens in zip(prompts, texts, strict=True):
        features = engine.core.features_of(tokens)
        if features is None:
            features = target.embedding.weight.new_empty(0)
        states = features.view(len(tokens), len(target.feature_layers), target.embedding.weight.shape[1])
        recorded.append(Text(prompt, tokens, states))
    return recorded


@torch.inference_mode()
def measure(
    draft: Draft,
    num_steps: int,
    target: LanguageModel,
    texts: Sequence[Text],
    pairing: int = 0,
    num_nodes: int | None = None,
) -> Acceptance:
    """Return the acceptance of a draft that is not open yet, of `num_steps` tokens after each root.

    Args:
        draft: configured for a chain of as many steps, or for trees.
        num_steps: tokens of a text that drafts are compared with.
        target: the target, whose states the texts have.
        texts: to draft.
        pairing: shift of the features relative to the tokens: above 0, rows get the states of later tokens.
        num_nodes: of a tree, the root included; None: of a chain.
    """
    needs = draft.needs(target.config)
    layers = [target.feature_layers.index(layer) for layer in needs.feature_layers]
    longest = max(len(text.tokens) for text in texts)
    num_slots = max(len(roots_of(text, num_steps)) for text in texts)
    before = max(needs.lookahead - 1, 0)  # of the text's last rows, those that a slot's drafts write over
    own = before + max(num_steps + 2, needs.scratch_rows)  # rows of a slot after the shared text
    state = EngineState.create(
        num_slots=num_slots,
        vocab_size=0,  # no round runs that would edit logits or continue from hidden states
        hidden_size=0,
        dtype=target.embedding.weight.dtype,
        max_len=longest,
        max_stop_tokens=0,
        num_pages=longest + num_slots * own,
        max_pages=longest + own,
        page_size=1,
        fixed_split=None,
        device=target.embedding.weight.device,
    )
    open_draft(draft, DraftContext(target, state, target.max_len, False, None, "specdec doctor passes token ids"))
    try:
        acceptance = Acceptance([], [], [0] * num_steps, [0] * num_steps, covered(draft, texts))
        for text in texts:
            features = None
            if layers:
                features = shifted(text.features[:, layers].flatten(1), pairing)
            right = drafts_right(draft, state, num_steps, text, features, before, num_nodes or num_steps + 1)
            count(right, acceptance)
            forget(draft)  # what an index has of this text
    finally:
        close_draft(draft)
    return acceptance


def covered(draft: Draft, texts: Sequence[Text]) -> float | None:
    """Return the share of the continuations' tokens that the open draft can propose at all."""
    id_map: Tensor | None = getattr(draft, "id_map", None)
    if id_map is None:
        return None
    written = torch.tensor([token for text in texts for token in text.tokens[len(text.prompt) :]])
    return float(torch.isin(written, id_map.cpu()).float().mean())


def roots_of(text: Text, num_steps: int) -> range:
    """Return the tokens that may be roots of rounds: those of the continuation with enough text ahead.

    No round drafts the first one.
    """
    return range(len(text.prompt), len(text.tokens) - num_steps)


def shifted(features: Tensor, by: int) -> Tensor:
    """Return rows shifted by `by`, with the first or last one repeated at the border."""
    at = (torch.arange(len(features), device=features.device) + by).clamp(0, len(features) - 1)
    return features[at]


def drafts_right(
    draft: Draft, state: EngineState, num_steps: int, text: Text, features: Tensor | None, before: int, num_nodes: int
) -> list[int]:
    """Return for each root how many drafts after it are right; they write over `before` rows before it."""
    device = state.seq_lens.device
    roots = roots_of(text, num_steps)
    if not roots:
        return []

    def integers(values: Sequence[int] | range) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    tokens, slots, lengths = integers(text.tokens), integers(range(len(roots))), integers(roots)
    share_text(state, len(text.tokens), lengths - before)
    state.root_tokens[: len(roots)] = tokens[roots.start : roots.stop]
    state.seq_lens[: len(roots)] = lengths
    for slot in range(len(roots)):
        for each in walk(draft):
            each.begin(slot, DraftRequest(slot, text.tokens[: roots[slot] + 1], group=slot + 1))
    length = roots.stop - 1  # rows before the last root; row i is in page i
    zero, positions = integers([0]), integers(range(length))[None]
    prefill = Prefill(
        tokens=tokens[None, :length],
        next_tokens=tokens[None, 1 : length + 1],
        positions=positions,
        rows=PagedBatch(
            slots=zero, page_table=positions, prefix_lens=zero, tail_len=length, num_valid=integers([length])
        ),
        piece_slots=slots[-1:],
        slots=slots,
        ends=lengths,
        last_rows=lengths - 1,
    )
    draft.prefill(prefill, None if features is None else features[None, :length])
    for back in range(1, before + 1):
        copy_rows(pools_of(draft), state.pool.page_table[: len(roots)], lengths - back)
    for each in walk(draft):
        each.activate(slots)
    # As if a round had just committed the roots alone: the draft then drafts what follows them.
    state.prefix_lens[: len(roots)] = lengths - 1
    accepted = Accepted(
        tokens=state.root_tokens[: len(roots), None].contiguous(),
        num_valid=torch.ones_like(slots),
        path=torch.zeros_like(slots)[:, None],
    )
    proposal = draft.propose(slots, DraftBudget(1))
    tree = scored_tree_of(proposal.drafts, slots, 1, state)
    committed = Committed(accepted, accepted.num_valid, 1, integers(range(len(roots) + 1)), tree)
    draft.extend(slots, committed, proposal, None if features is None else features[lengths - 1])
    drafts = draft.propose(slots, DraftBudget(num_nodes)).drafts
    truth = torch.stack([tokens[roots.start + step : roots.stop + step] for step in range(1, num_steps + 1)], 1)
    if isinstance(drafts, ScoredTree):
        right = right_in(drafts.tree, truth)
    else:
        right = (drafts.tokens == truth).int().cumprod(1).sum(1)
    for slot in range(len(roots)):
        for each in walk(draft):
            each.release(slot)
    counts: list[int] = right.tolist()
    return counts


def right_in(tree: Tree, truth: Tensor) -> Tensor:
    """Return [B], how many of the tokens truth [B, D] that follow the roots the paths of trees [B, N] begin with."""
    batch, num_nodes = tree.tokens.shape
    rows, depths = torch.arange(batch, device=truth.device), tree.positions - tree.positions[:, :1]
    is_right = depths == 0
    for node in range(1, num_nodes):
        depth, parent = depths[:, node], tree.parents[:, node].clamp(min=0)
        expected = truth[rows, (depth.long() - 1).clamp(0, truth.shape[1] - 1)]
        is_node = (node < tree.num_nodes) & (depth <= truth.shape[1])
        is_right[:, node] = is_node & is_right[rows, parent] & (tree.tokens[:, node] == expected)
    return torch.where(is_right, depths, 0).amax(1)


def share_text(state: EngineState, num_rows: int, lengths: Tensor) -> None:
    """Map slot i to the text's first lengths[i] rows, and after them to rows of its own."""
    table = state.pool.page_table
    columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
    beyond = columns - lengths[:, None]
    own = (len(state.pool.free_stack) - num_rows) // len(table)
    mine = num_rows + torch.arange(len(lengths), dtype=torch.int32, device=table.device)[:, None] * own
    table[: len(lengths)] = torch.where(beyond < 0, columns, torch.where(beyond < own, mine + beyond, -1))


def copy_rows(pools: Sequence[KvPools], page_table: Tensor, rows: Tensor) -> None:
    """Copy one row of the text, if there is such a row, to the place that each slot's table has for it."""
    page_table, rows = page_table[rows >= 0], rows[rows >= 0].long()
    places = page_table.gather(1, rows[:, None])[:, 0].long()
    for group in (group for each in pools for group in each.groups):
        for pool in group.pools:
            pool[:, places] = pool[:, rows]


def count(right: list[int], acceptance: Acceptance) -> None:
    """Add a text: its consecutive rounds, and all possible rounds by depth."""
    at = rounds = 0
    while at < len(right):
        at += right[at] + 1
        rounds += 1
    acceptance.rounds.append(rounds)
    acceptance.tokens.append(at)
    for depth in range(len(acceptance.right)):
        acceptance.reached[depth] += sum(drafts >= depth for drafts in right)
        acceptance.right[depth] += sum(drafts > depth for drafts in right)
