"""EAGLE and EAGLE-3: a draft head over the target's states.

Draft row i pairs token i+1 with the feature of position i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.heads.base import DraftHead, Features, HeadStorage
from ...models.heads.checkpoint import HeadCheckpoint
from ...models.heads.eagle import EagleHead
from ...models.heads.eagle3 import Eagle3Head, feature_layers
from ...models.heads.loading import config_of_head, frequent_tokens, load_head, num_layers_of, own_vocabulary
from ...models.layers.paged_batch import PagedBatch
from ...ops import DraftExtendInputs
from .context import DraftContext, PrefillRows
from .head import HasHead
from .model import ModelDraft, check_storage, storage_of
from .needs import Needs


class HeadDraft(HasHead, ModelDraft):
    """A draft with a head. Its draft state, per slot, includes the head's output at the last committed row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_head()

    def feature_layers(self, config: Any, num_target_layers: int) -> tuple[int, ...]:
        """Return the layers of the target whose input hidden states the head reads."""
        raise NotImplementedError

    def needs(self, target: Any) -> Needs:
        config = config_of_head(self.kind, self.head)
        layers = self.feature_layers(config, target.num_hidden_layers)
        needs = self.model_needs(config, num_layers_of(self.kind, self.head), feature_layers=layers)
        return replace(needs, tensor_prefixes=self.tensor_prefixes)

    def open(self, context: DraftContext) -> None:
        super().open(context)
        self.module = self.load(context)
        self.id_map = self.module.id_map
        # For each slot, and for slot -1, the feature that all depth-1 nodes share.
        like = context.target.embedding.weight
        self.last_hidden = like.new_zeros(context.num_slots + 1, self.module.feature_size)
        self.allocate_backlog_features(like, len(self.needs(context.target.config).feature_layers) * like.shape[1])
        if self.sampled:
            self.allocate_root_logits(self.module.logits(self.last_hidden[:1]))
        else:
            self.module.divide_logits()

    def save(self, slot: int) -> dict[str, Tensor]:
        return super().save(slot) | {"last_hidden": self.last_hidden[slot]}

    def storage(self, context: DraftContext) -> HeadStorage:
        """Return how the head keeps its weights and its KV."""
        return HeadStorage()

    def load(self, context: DraftContext) -> DraftHead:
        """Return the loaded head."""
        sizes = {"num_pages": context.num_pages, "page_size": context.page_size}
        module: DraftHead = load_head(self.kind, self.head, context.target, **sizes, storage=self.storage(context))
        return module

    @property
    def loaded(self) -> DraftHead:
        return self.module

    def root_features(self, slots: Tensor, k: int) -> Features:
        return Features(self.last_hidden, slots[:, None].expand(-1, k).flatten().contiguous())

    def step(
        self, depth: int, tokens: Tensor, positions: Tensor, features: Features | None, rows: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        assert features is not None
        return self.module.step(depth, tokens, positions, features, rows)

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        assert features is not None
        joined = Features(self.module.join(features).flatten(0, 1))
        self.module.prefill(prefill.next_tokens, joined, prefill.positions, prefill.rows)

    def run_committed(self, extend: DraftExtendInputs, features: Tensor | None, rows: PagedBatch) -> None:
        assert features is not None
        joined = Features(self.module.join(features))
        output = self.module(extend.tokens, joined, extend.positions, rows, only=extend.last_rows)
        self.set_root_children(extend.kept_slots, self.module.logits(output.normed))
        self.last_hidden[extend.kept_slots] = output.hidden  # the feature that these children share


@dataclass
class FrequentTokensDraft(HeadDraft):
    """A draft with a head that may draft among a part of the target's tokens (`vocabulary`)."""

    vocabulary: str | Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary is not None and not isinstance(self.vocabulary, str | Path):
            name, given = type(self).__name__, f"a {type(self.vocabulary).__name__}"
            raise ValueError(f"{name}: vocabulary is {given}, expected a file of token ids or None")

    def check_vocabulary(self, vocab: int) -> None:
        """Raise a ValueError for fewer than `topk` tokens, or what `frequent_tokens` refuses."""
        if self.vocabulary is not None and (count := len(self._frequent_tokens(vocab))) < self.topk:
            name = type(self).__name__
            raise ValueError(f"{name}: vocabulary has {count} tokens, expected at least topk={self.topk}")

    def load(self, context: DraftContext) -> DraftHead:
        module = self.load_whole(context)
        if self.vocabulary is not None:
            module.draft_among(self._frequent_tokens(context.vocab_size))
        return module

    def load_whole(self, context: DraftContext) -> DraftHead:
        """Return the loaded head, which drafts among all tokens."""
        return super().load(context)

    def _frequent_tokens(self, vocab: int) -> list[int]:
        assert self.vocabulary is not None
        return frequent_tokens(self.vocabulary, vocab, f"{type(self).__name__}: vocabulary")


@dataclass
class Eagle3(HeadDraft):
    """Drafts with an EAGLE-3 head (arXiv 2503.01840).

    Args:
        head: folder or hub id of the head in a published format, EAGLE-3.1 among them; a `HeadCheckpoint`, for tensors
            under a prefix of the target's checkpoint; or an `Eagle3Head`.
        num_steps: depth of drafting, 1 to 64.
        topk: branches of each step, 1 to 64; 1 drafts a chain.
        num_nodes: tree nodes verified in a round, the root included, 1 to 256. None: num_steps + 1 for a chain, else
            48; an adaptive engine verifies as many of them as pay.
        sampled: draw the drafts of requests that sample, and accept or reject them as a block, instead of taking the
            likeliest: rounds of a chain (topk=1) give more tokens. One seed then gives one text for this draft alone,
            as long as the request is not retracted and rounds are not adaptive.
        draft_weights: "fp8" quantizes the head's own linears to 8 bits when it is loaded, with a scale for each row of
            a weight and of its input: half of the bytes, and drafts that differ by rounding. "fp8-head" does the same,
            and an LM head that is the target's becomes a copy in 8 bits. None: as they are.
        kv_dtype: "fp8_e4m3" keeps the draft's own keys and values in 8 bits, whatever the target's. None: in the dtype
            of the weights.

    Raises:
        ValueError: a number out of range; `sampled` with more than one branch; a head that is none.
    """

    head: str | Path | HeadCheckpoint | Eagle3Head
    draft_weights: str | None = field(default=None, kw_only=True)
    kv_dtype: str | torch.dtype | None = field(default=None, kw_only=True)

    kind = Eagle3Head

    def __post_init__(self) -> None:
        super().__post_init__()
        check_storage(type(self).__name__, self.draft_weights, self.kv_dtype)

    def needs(self, target: Any) -> Needs:
        needs = super().needs(target)
        in_8_bits = self.kv_dtype is not None
        return replace(needs, attention=tuple(call._replace(in_8_bits=in_8_bits) for call in needs.attention))

    def storage(self, context: DraftContext) -> HeadStorage:
        return storage_of(self, context)

    def feature_layers(self, config: Any, num_target_layers: int) -> tuple[int, ...]:
        return feature_layers(config, num_target_layers)


@dataclass
class Eagle(FrequentTokensDraft):
    """Drafts with a head of EAGLE or EAGLE-2 (arXiv 2401.15077, 2406.16858).

    Args:
        head: folder or hub id of the head in its published format, a `HeadCheckpoint`, or an `EagleHead`.
        num_steps, topk, num_nodes, sampled: as for `Eagle3`.
        vocabulary: a file of token ids among which alone it drafts, the target's most frequent ones, as FR-Spec
            publishes them (arXiv 2502.14856): its path, or that of a file of a hub id. The product with `lm_head` is as
            much shorter. None: all tokens.

    Raises:
        ValueError: as for `Eagle3`; a vocabulary that is none of the target's, or is given with a head that has one.
        FileNotFoundError: no such file.
    """

    head: str | Path | HeadCheckpoint | EagleHead

    kind = EagleHead

    def needs(self, target: Any) -> Needs:
        if self.vocabulary is not None and own_vocabulary(self.kind, self.head):
            raise ValueError("Eagle: vocabulary is given, expected None for a head with a vocabulary of its own")
        self.check_vocabulary(target.vocab_size)
        return super().needs(target)

    def feature_layers(self, config: Any, num_target_layers: int) -> tuple[int, ...]:
        # The head's feature is the state after the target's final norm, which it makes from the one entering it.
        return (num_target_layers,)
