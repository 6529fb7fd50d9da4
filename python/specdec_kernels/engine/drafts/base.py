"""The interface between a round and whatever drafts for it; as it stands here it is plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.kv_pools import KvPools
from ...models.language_model import LanguageModel
from ...models.weights.update import Update
from ..device.kv_buckets import AttentionCall
from ..device.prefill import Prefill
from ..device.state import EngineState
from .proposal import Committed, Proposal, no_candidates


@dataclass(frozen=True)
class Needs:
    """What an engine provides for a draft.

    Attributes:
        num_nodes: N, most nodes of a tree, the root included: 1 to 256.
        accept_width: S, most tokens that a round can emit: the nodes of the longest path, the root included.
        feature_layers: layers of the target whose entering hidden states `prefill` and `extend` receive, side by side
            in this order; the number of layers itself names the state entering the final norm.
        scratch_rows: KV rows behind L that a `propose` writes into pools of the draft's own.
        kv_numbers: numbers that a KV row takes in pools of the draft's own, keys and values of all layers together;
            0: it has none, and pages behind the windows of the target's layers may be given back.
        attention: the attention of `propose` and `extend`, of which captured rounds are chosen. What is not named here
            is right all the same, but its kernels may be those for longer KV.
        max_idle_rounds: rounds that a slot's draft can rest before it has to catch up (`rest`); 0: it does not rest.
        num_steps: levels of its deepest tree, where each is a pass of a model: rounds of few rows for each request ask
            for trees of as many levels at most. 0: depth costs nothing.
    """

    num_nodes: int
    accept_width: int
    feature_layers: tuple[int, ...] = ()
    scratch_rows: int = 0
    kv_numbers: int = 0
    attention: tuple[AttentionCall, ...] = ()
    max_idle_rounds: int = 0
    num_steps: int = 0


@dataclass(frozen=True)
class DraftContext:
    """What a draft finds when it is opened.

    Attributes:
        target: the model it drafts for, loaded.
        state: the slots' tensors, which stay where they are.
        max_len: longest sequence, prompt included.
        catches_up: a draft that has rested is asked to draft again; else whoever rests never drafts.
        tokenizer: the target's; None where it has none.
        no_tokenizer: why there is none.
    """

    target: LanguageModel
    state: EngineState
    max_len: int
    catches_up: bool
    tokenizer: Any
    no_tokenizer: str

    @property
    def device(self) -> torch.device:
        device: torch.device = self.state.seq_lens.device
        return device

    @property
    def num_slots(self) -> int:
        return len(self.state.seq_lens)

    @property
    def num_pages(self) -> int:
        return len(self.state.pool.free_stack)

    @property
    def page_size(self) -> int:
        return self.state.pool.page_size

    @property
    def vocab_size(self) -> int:
        size: int = self.target.config.vocab_size
        return size


class DraftBudget(NamedTuple):
    """What a round may spend on drafting for each of its requests.

    Attributes:
        num_nodes: most nodes of a tree, the root included: 1 to `Needs.num_nodes`. 1: nothing is drafted.
        max_kv_len: KV rows that no slot exceeds, for `DraftState.rows`; None: no bound is known.
    """

    num_nodes: int
    max_kv_len: int | None = None


class DraftRequest(NamedTuple):
    """What a draft learns of a request that gets a slot.

    Attributes:
        id: the engine's number for it, which it keeps when it is retracted.
        tokens: its prompt, and what it produced before a retraction.
        group: who shares its text (`SamplingParams.ngram_group`); 0: everybody.
        prediction: what its text may repeat; only for drafts that take predictions.
        cached: rows of its text that are there already, in pools of the draft's own too: `prefill` gets those behind.
    """

    id: int
    tokens: list[int]
    group: int
    prediction: Sequence[int] = ()
    cached: int = 0


class Draft:
    """What proposes a round's trees. The base class proposes nothing, which is plain decoding.

    A draft has two lives. Made by its user, it holds options and has loaded nothing. An engine asks for its `needs`,
    opens it beside the target, and then calls, for each slot, `begin`, `prefill` for each chunk of the prompt,
    `activate`, `propose` and `extend`, or `rest`, in every round, and `release`. It serves one engine until that is
    closed.

    All calls come from one thread, in the order of the device's stream. `propose`, `extend`, `rest` and `catch_up` must
    leave the host alone, so that a CUDA graph can hold them: no value of a tensor is read, shapes follow from the
    arguments, and what is kept between rounds is written in place. Where `slots` is -1 a row is empty: nothing may be
    kept of it.

    Attributes:
        sampled: the drafts of requests that sample are drawn, and verified as a block: see `Proposal.drawn_from`.
        cacheable: what it keeps of a committed text, but for what its last row yields, is in rows of its pools, of
            which row i depends on tokens 0 to i + 1 alone. Others take no part in a prefix cache.
        reads_others: what is proposed for a request depends on the text of others, also where nothing is learnt of them
            (`batch_invariant`).
        takes_predictions: requests may bring what their text may repeat (`SamplingParams.prediction`).
    """

    sampled: bool = False
    cacheable: bool = True
    reads_others: bool = False
    takes_predictions: bool = False
    context: DraftContext
    _closed: dict[str, Any]

    def needs(self, target: Any) -> Needs:
        """What an engine is to provide, where `target` is the config of its model. Loads no weights.

        Raises:
            ValueError: options that do not fit this target.
            OSError: no such model.
        """
        return Needs(num_nodes=1, accept_width=1)

    @property
    def parts(self) -> list[Draft]:
        """The drafts that this one unites; itself, where it is of one piece."""
        return [self]

    @property
    def is_open(self) -> bool:
        return "context" in vars(self)

    def expect_closed(self) -> None:
        """ValueError where an engine has this draft already."""
        if self.is_open:
            raise ValueError(
                f"Engine: draft ({type(self).__name__}) is open in another engine, "
                "expected one for this engine alone, or the other one closed"
            )

    def open(self, context: DraftContext) -> None:
        """Load and allocate what rounds need. What is set from here on is forgotten by `close`.

        Raises:
            ValueError: it is open already; a model that does not fit the target.
        """
        self.expect_closed()
        self._closed = dict(vars(self))
        self.context = context

    def close(self) -> None:
        """Be as before `open`, with all memory given back."""
        closed = self._closed
        vars(self).clear()
        vars(self).update(closed)

    @property
    def state(self) -> EngineState:
        return self.context.state

    @property
    def pools(self) -> list[KvPools]:
        """KV pools of the draft's own, with pages as the target's; memory for more of them is planned by these."""
        return []

    def resize_pools(self, num_pages: int) -> None:
        """Make `pools` anew, empty, with another number of pages."""

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """What becomes of the draft's weights by these, named as its checkpoint's, which errors call `name`. Changes
        nothing yet.

        Raises:
            TypeError, ValueError: what is no weight of this draft, or none that can take its place.
        """
        raise ValueError(f"{name} is given, expected None for {type(self).__name__}, which has no weights")

    def refresh(self) -> None:
        """Weights have changed at their places, the target's or the draft's: what was made of them follows. No request
        has a slot."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those that `sleep` puts away; those of modules that its user gave are not among them."""
        return {}

    @property
    def is_given(self) -> bool:
        """Whether it has weights that are its user's."""
        return False

    def sleep(self, level: int) -> None:
        """Give back the memory of pools, and of weights: level 1, what host memory can keep for the time; level 2, all.
        No request has a slot."""
        self.resize_pools(0)

    def wake(self, level: int, num_pages: int) -> None:
        """Be as before `sleep`, with empty pools; weights that were given back are zeros."""
        self.resize_pools(num_pages)

    def begin_anew(self) -> None:
        """Rounds were timed with requests of their own: forget what was learnt of their texts. No request has a slot,
        and captured rounds stay."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """The slot now belongs to this request."""

    def prefill(self, prefill: Prefill, features: Tensor | None) -> None:
        """The target has just run these pieces of prompts; `features` [P, Q, n * H] are its states, as in `extend`. The
        last row of a prompt is the root's, whose successor is not known: there it is the root itself, and what is kept
        of that row comes again with `extend` of the first round."""

    def activate(self, slots: Tensor) -> None:
        """Prefill of slots [R] is complete: their roots and lengths are set. Their first round comes next: `propose` of
        a node alone, and `extend` with the token behind it."""

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        """Draft after the roots of slots [B] int32, for trees of up to `budget.num_nodes` nodes.

        The engine chooses the budget for each round, and cuts each tree to its request's share: the first nodes of a
        larger tree are those of a smaller one.
        """
        return Proposal(no_candidates(slots))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        """The round that verified this proposal is committed: lengths and roots of slots [B] are the new ones.

        `features` [M, n * H] are the target's states of all nodes, those of request b from row
        `committed.cu_seqlens[b]` on; None where no layer was asked for.
        """

    def rest(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        """In place of `extend`, of a round without candidates, where drafting does not pay: does as little as it can,
        and keeps what it needs to catch up. A draft without a model has nothing to save.
        """
        self.extend(slots, committed, proposal, features)

    def catch_up(self, slots: Tensor, max_kv_len: int | None = None) -> None:
        """Be for slots [B] as if no round had been one of rest. Comes before the first `propose` that asks for
        candidates, and at the latest after `Needs.max_idle_rounds` rounds of rest of a slot that wants drafts.
        """

    def save(self, slot: int) -> dict[str, Tensor]:
        """What it keeps of a slot between two rounds, beside rows of its pools: views of tensors whose shapes are those
        of any slot. For a request that goes to another engine, behind `catch_up`. What is called `..._ids` holds
        tokens, and is checked where it arrives."""
        return {}

    def restore(self, slot: int, kept: Mapping[str, Tensor]) -> None:
        """In place of `prefill` and `activate`: the slot, behind `begin`, goes on from what `save` gave elsewhere. Rows
        of its pools are there."""

    def release(self, slot: int) -> None:
        """The slot's request is gone."""
