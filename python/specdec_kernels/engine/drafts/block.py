"""Block drafters: one forward pass over the root and mask tokens predicts all positions of a round.

Draft row i holds keys and values made of the target's states at token i, in every layer. `propose` runs a block of rows
after them, whose own keys and values are scratch, and `extend` injects the states of the accepted tokens. Nothing else
is kept of a slot.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...models.families import kv_numbers
from ...models.heads.block import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from ...models.heads.block_config import BlockConfig
from ...models.heads.checkpoint import HeadCheckpoint
from ...models.heads.loading import config_of_head, has_confidence, load_head
from ...models.weights.checkpoint import local_folder
from ...ops import Candidates, TopK, expand_trellis, make_calibration, select_topk
from ..options import check_range
from .base import DraftBudget
from .calibrated import CalibratedDraft
from .context import DraftContext, PrefillRows
from .head import HasHead
from .model import check_sampled, check_storage, draw_tokens, extend_rows, seeds_of_round, storage_of
from .needs import AttentionCall, Needs
from .proposal import Committed, DrawnFrom, Proposal, ScoredTree, makes_valid_trees, no_candidates

MOST_DEPTH = 16  # of `expand_trellis`
DEFAULT_NUM_NODES = 32  # of a tree
DEFAULT_CANDIDATES = 16
FOLDER_IN_TARGET = "dspark"  # of a drafter that a vendor ships with a target


@dataclass
class BlockDraft(HasHead, CalibratedDraft):
    """The base of all kinds of block drafters; each has a class of heads.

    Where positions are predicted by themselves, or with scores of pairs of neighbors, the block is a trellis of
    candidates, and the tree is its best paths. Where a state is carried along the path, and where drafts are drawn, it
    is a chain, whose tokens are chosen one after another.
    """

    head: str | Path | HeadCheckpoint | BlockHead
    _: KW_ONLY
    num_steps: int | None = None
    topk: int | None = None
    num_candidates: int | None = None
    num_nodes: int | None = None
    sampled: bool = False
    draft_weights: str | None = None
    kv_dtype: str | torch.dtype | None = None

    kind: ClassVar[type[BlockHead]]
    position_offset = 0  # row i of a block is rotated at L + position_offset + i

    def __post_init__(self) -> None:
        name = type(self).__name__
        limits = ("num_steps", MOST_DEPTH), ("topk", 256), ("num_candidates", 64), ("num_nodes", 256)
        for option, high in limits:
            if (value := getattr(self, option)) is not None:
                check_range(f"{name}: {option}", value, 1, high)
        check_storage(name, self.draft_weights, self.kv_dtype)
        check_sampled(name, self.sampled, self.topk)
        self.check_head()

    @property
    def loaded(self) -> BlockHead:
        return self.module

    @property
    def source(self) -> str | Path | HeadCheckpoint | BlockHead:
        """The place of the head."""
        return self.head

    def find_source(self, target: Any) -> None:
        """Find the head of a draft that was given none, in the folder of a target with this config."""

    def block_of(self, num_target_layers: int) -> BlockConfig:
        """Return what the head's config says of its blocks.

        Raises:
            ValueError: options that the head cannot have.
        """
        block = self.kind.block_config(config_of_head(self.kind, self.source), num_target_layers)
        name, depth = type(self).__name__, min(block.depth, MOST_DEPTH)
        if self.num_steps is not None and self.num_steps > depth:
            raise ValueError(f"{name}: num_steps is {self.num_steps}, expected 1 to {depth} (the block's)")
        if block.markov == "rnn" and self.topk not in (None, 1):
            raise ValueError(f"{name}: topk is {self.topk}, expected 1 for a head that carries a state (a chain)")
        if self.sampled and block.top_k:
            raise ValueError(f"{name}: sampled is True, expected False for a head that scores its candidates alone")
        return block

    def depth_of(self, block: BlockConfig) -> int:
        """Return the positions that are drafted."""
        return self.num_steps or min(block.depth, MOST_DEPTH)

    def needs(self, target: Any) -> Needs:
        self.find_source(target)
        block, config = self.block_of(target.num_hidden_layers), config_of_head(self.kind, self.source)
        depth, num_layers = self.depth_of(block), config.num_hidden_layers
        attention = AttentionCall.of(config, block.block_size, False, num_layers)
        is_chain = self.topk == 1 or block.markov == "rnn"
        return Needs(
            num_nodes=self.num_nodes or (depth + 1 if is_chain else DEFAULT_NUM_NODES),
            accept_width=depth + 1,
            feature_layers=block.feature_layers,
            tensor_prefixes=self.tensor_prefixes,
            scratch_rows=block.block_size,
            kv_numbers=kv_numbers(config, num_layers),
            kv_windows=tuple(dict.fromkeys(block.windows)),
            attention=(attention._replace(in_8_bits=self.kv_dtype is not None),),
            lookahead=0,
            scored_before_draw=self.sampled and self.is_calibrated,
        )

    @property
    def is_calibrated(self) -> bool:
        """Whether scores are calibrated: those of drawn tokens if a confidence head gives them before the draw."""
        return not self.sampled or has_confidence(self.kind, self.source)

    def open(self, context: DraftContext) -> None:
        sizes = {"num_pages": context.num_pages, "page_size": context.page_size}
        storage = storage_of(self, context)
        self.module: BlockHead = load_head(self.kind, self.source, context.target, **sizes, storage=storage)
        self._depth = self.depth_of(self.module.block)
        like, num_nodes = self.state.seq_lens, self.needs(context.target.config).num_nodes
        self.calibration = make_calibration(self._depth, like=like) if self.is_calibrated else None
        rows = torch.arange(-1, num_nodes - 1, dtype=torch.int32, device=context.device)  # node i is drawn from row i-1
        self._draft_rows = rows.where(rows < self._depth, -1).repeat(context.num_slots, 1)
        # What is the same in every round is not computed there.
        first, size = self.position_offset, self.module.block.block_size
        self._block_rows = torch.arange(first, first + size, dtype=torch.int32, device=context.device)
        self._first_slot = torch.zeros(1, dtype=torch.int64, device=context.device)
        self._whole_mask = self.module.whole_mask(context.num_slots)
        vocab = self.module.lm_head.out_features
        self._top_k = min(self.num_candidates or self.module.block.top_k or DEFAULT_CANDIDATES, vocab)

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        assert features is not None
        self.module.inject(features.flatten(0, 1), prefill.positions, prefill.rows)

    @makes_valid_trees
    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        if budget.num_nodes == 1:
            return Proposal(no_candidates(slots))
        state, module = self.state, self.module
        at = torch.maximum(slots, self._first_slot)  # int64, as indexing needs it
        roots, lens = state.root_tokens[at], state.seq_lens[at]
        rows = module.block.block_size
        positions = lens[:, None] + self._block_rows
        batch = state.rows(slots, state.seq_lens, tail_len=rows, max_kv_len=budget.max_kv_len)
        depth = min(self._depth, budget.num_nodes - 1)  # no tree is deeper than its nodes in a row
        states = module.run_block(roots, positions, batch, self._whole_mask[: len(slots)])[:, :depth].contiguous()
        logits = module.logits(states.flatten(0, 1)).view(len(slots), depth, -1)
        if self.sampled or module.block.markov == "rnn":
            return self._chain(slots, roots, states, logits, budget.num_nodes)
        best = select_topk(logits.flatten(0, 1), self._top_k)
        ids, logprobs = (part.view(len(slots), depth, -1) for part in best)
        by_confidence = self.topk == 1 and module.has_confidence
        candidates = expand_trellis(
            ids,
            logprobs,
            budget.num_nodes - 1,
            **module.transitions(states, ids, roots)._asdict(),
            id_map=module.id_map,
            calibration=None if by_confidence else self.calibration_table,
            width=self.topk or 256,
        )
        if by_confidence:  # the same chain, with other scores
            candidates = self._scored_chain(candidates.tokens[:, :depth].contiguous(), states, roots, budget.num_nodes)
        return Proposal(candidates)

    def _scored_chain(self, tokens: Tensor, states: Tensor, roots: Tensor, num_nodes: int) -> Candidates:
        """Return the chain [B, D] with scores of the confidence head, each of the tokens before its own."""
        sure = self.module.confidence(states, roots, tokens)[..., None]
        return expand_trellis(tokens[..., None], sure, num_nodes - 1, calibration=self.calibration_table)

    def _chain(self, slots: Tensor, roots: Tensor, states: Tensor, logits: Tensor, num_nodes: int) -> Proposal:
        """Choose or draw the tokens of a chain one after another, each after the one before it."""
        module, choose = self.module, self._draw if self.sampled else self._choose
        markov, before = module.markov, roots
        carried = None if markov is None else markov.start(states)
        chosen, of_steps = [], []
        for step in range(states.shape[1]):
            scored = logits[:, step]
            if markov is not None and carried is not None:
                bias, carried = markov.bias(before, states[:, step], carried)
                scored = scored + bias
            of_steps.append(scored)
            chosen.append(choose(scored, slots, step + 1))
            before = chosen[-1].ids[:, 0]
        ids, logprobs = (torch.stack(parts, 1) for parts in zip(*chosen, strict=True))
        if module.has_confidence:
            candidates = self._scored_chain(ids[..., 0].contiguous(), states, roots, num_nodes)
        else:
            candidates = expand_trellis(ids, logprobs, num_nodes - 1, calibration=self.calibration_table)
        if not self.sampled:
            return Proposal(candidates)
        rows = self._draft_rows[: len(slots), :num_nodes].contiguous()
        return Proposal(candidates, DrawnFrom(torch.stack(of_steps, 1), rows, module.id_map))

    def _choose(self, logits: Tensor, slots: Tensor, depth: int) -> TopK:
        best: TopK = select_topk(logits, 1, id_map=self.module.id_map)
        return best

    def _draw(self, logits: Tensor, slots: Tensor, depth: int) -> TopK:
        return draw_tokens(self.state, seeds_of_round(self.state), slots, logits, depth, self.module.id_map)

    @staticmethod
    def _verified(committed: Committed) -> Committed:
        """Leave out the nodes that were not verified: a drawn token that the target draws too is no accepted one."""
        tree, scores = committed.tree
        num_nodes = torch.minimum(tree.num_nodes, committed.cu_seqlens.diff().to(torch.int32))
        return committed._replace(tree=ScoredTree(tree._replace(num_nodes=num_nodes), scores))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        assert features is not None
        self.learn(self._verified(committed) if self.sampled else committed)
        extend, rows = extend_rows(self.state, slots, committed)
        self.module.inject(features[extend.node_rows.flatten()], extend.positions, rows)


@dataclass
class DFlash(BlockDraft):
    """Drafts with a DFlash drafter: positions are predicted by themselves.

    Args:
        head: folder or hub id of the drafter in a published format, a `HeadCheckpoint` or a `DFlashHead`.
        num_steps: positions that are drafted, 1 to 16; None: all that the block has.
        topk: most nodes of a depth, 1 to 256; 1 drafts a chain. None: as many as the tree takes.
        num_candidates: tokens of each position that may become nodes, 1 to 64; None: as published, or 16.
        num_nodes: tree nodes verified in a round, the root included, 1 to 256. None: num_steps + 1 for a chain, else
            32; an adaptive engine verifies as many of them as pay.
        sampled, draft_weights, kv_dtype: as for `Eagle3`.

    Raises:
        ValueError: a number out of range; `sampled` with more than one branch; a head that is none.
    """

    kind = DFlashHead


@dataclass
class JetSpec(DFlash):
    """Drafts with a JetSpec drafter, which is one of DFlash with causal blocks.

    Args:
        head, num_steps, topk, num_candidates, num_nodes, sampled, draft_weights, kv_dtype: as for `DFlash`.

    Raises:
        ValueError: as for `DFlash`; a drafter whose blocks are not causal.
    """

    def block_of(self, num_target_layers: int) -> BlockConfig:
        block = super().block_of(num_target_layers)
        if not all(block.causal):
            raise ValueError(
                "JetSpec: head has blocks that are not causal, expected causal ones (DFlash drafts with it)"
            )
        return block


@dataclass
class DFlash2(BlockDraft):
    """Drafts with a DFlash2 drafter: neighboring candidates have scores of their own.

    Args:
        head, num_steps, topk, num_candidates, num_nodes, draft_weights, kv_dtype: as for `DFlash`.
        sampled: False alone.

    Raises:
        ValueError: as for `DFlash`; `sampled`.
    """

    kind = DFlash2Head


@dataclass
class DSpark(BlockDraft):
    """Drafts with a DSpark drafter: a serial head scores each token by the one before it.

    The tree is the best paths of the trellis that these scores make. A head that carries a state along the path drafts
    a chain.

    Args:
        head: as for `DFlash`; None: the folder `dspark` in the target's.
        num_steps, topk, num_candidates, num_nodes, sampled, draft_weights, kv_dtype: as for `DFlash`.

    Raises:
        ValueError: as for `DFlash`; `topk` above 1 for a head that carries a state; no folder of a drafter in the
            target's.
    """

    head: str | Path | HeadCheckpoint | BlockHead | None = None  # type: ignore[assignment]

    kind = DSparkHead

    def check_head(self) -> None:
        if self.head is not None:
            super().check_head()

    @property
    def model_name(self) -> str:
        return FOLDER_IN_TARGET if self.head is None else super().model_name

    @property
    def source(self) -> str | Path | HeadCheckpoint | BlockHead:
        return self._found if self.head is None else self.head

    def find_source(self, target: Any) -> None:
        if self.head is not None:
            return
        whole = target.name_or_path
        if not whole:
            raise ValueError("DSpark: head is None, expected a folder or hub id for a target that has none")
        self._found = local_folder(whole, "DSpark: target") / FOLDER_IN_TARGET
        if not self._found.is_dir():
            raise ValueError(
                f"DSpark: head is None, expected a folder or hub id: {whole} has no folder {FOLDER_IN_TARGET}"
            )
