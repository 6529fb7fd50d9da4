"""The interface between a round and what drafts for it; the base class by itself is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .context import DraftContext, DraftState, PrefillRows
from .needs import Needs
from .proposal import Committed, Proposal, makes_valid_trees, no_candidates


class DraftBudget(NamedTuple):
    """The budget of a round for drafting for each of its requests.

    Attributes:
        num_nodes: most nodes of a tree, the root included: 1 to `Needs.num_nodes`. 1: nothing is drafted.
        max_kv_len: KV rows that no slot exceeds, for `DraftState.rows`; None: no bound is known.
    """

    num_nodes: int
    max_kv_len: int | None = None


class DraftRequest(NamedTuple):
    """A request that gets a slot, as its draft sees it.

    Attributes:
        id: the engine's number for it, which it keeps when it is retracted.
        tokens: its prompt, and what it produced before a retraction.
        group: requests of one group share their texts (`SamplingParams.ngram_group`); 0: of everybody.
        prediction: what its text may repeat; only for drafts that take predictions.
        cached: rows of its text that pools hold already, the draft's own included; `prefill` gets the rows after them.
    """

    id: int
    tokens: list[int]
    group: int
    prediction: Sequence[int] = ()
    cached: int = 0


class Draft:
    """A proposer of a round's trees. The base class proposes nothing, which is plain decoding.

    Its user makes a draft with options; it has loaded nothing. An engine asks for its `needs` and opens it with the
    target. From then on the engine calls, for each slot, `begin`, `prefill` for each chunk of the prompt, `activate`,
    in every round `propose` and `extend`, and at the end `release`. All but `needs` and `propose` have a default that
    does nothing. What a draft can do beyond that is a class of its own, from which it inherits too: `Idleable`,
    `Migratable`, `Learner`, `HasPools`, `HasWeights`.

    A draft serves one engine until that is closed: then it is as before, and attributes that were set since `open` are
    gone.

    All calls come from one thread, in the order of the device's stream. CUDA graphs capture `propose`, `extend` and
    `catch_up`: these read no tensor's value on the host, derive shapes from their arguments alone, and write in place
    what they keep between rounds. Where `slots` is -1 a row is empty: nothing of it may be kept.

    Attributes:
        context: what the engine shows it, while it is open.
        sampled: the drafts of requests that sample are drawn, and verified as a block: see `Proposal.drawn_from`.
        cacheable: what it keeps of a committed text, except for what follows its last row, is in rows of its pools, of
            which row i depends on tokens 0 to i + 1 alone. Other drafts exclude a prefix cache.
        reads_others: what is proposed for a request depends on the text of others, also where nothing is learned of
            them (`batch_invariant`).
        takes_predictions: requests may bring what their text may repeat (`SamplingParams.prediction`).
    """

    sampled: bool = False
    cacheable: bool = True
    reads_others: bool = False
    takes_predictions: bool = False
    context: DraftContext
    _closed: dict[str, Any]  # its attributes before it was opened

    def needs(self, target: Any) -> Needs:
        """Return what an engine must provide, where `target` is the config of its model. Load no weights.

        Raises:
            ValueError: options that do not fit this target.
            OSError: no such model.
        """
        return Needs(num_nodes=1, accept_width=1)

    @property
    def members(self) -> tuple[Draft, ...]:
        """The drafts that this one combines; the engine opens and begins, activates, releases each by itself."""
        return ()

    @property
    def is_open(self) -> bool:
        """Whether an engine has this draft."""
        return "context" in vars(self)

    @property
    def state(self) -> DraftState:
        """The engine's tensors of all slots."""
        return self.context.state

    def open(self, context: DraftContext) -> None:
        """Load and allocate what rounds need.

        Raises:
            ValueError: a model that does not fit the target.
        """

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Start a request in this slot."""

    def prefill(self, prefill: PrefillRows, features: Tensor | None) -> None:
        """Follow the target over rows of prompts, with its states `features` [P, Q, n * H] as in `extend`.

        A prompt's last row is the root, whose successor is not known yet: `next_tokens` has the root itself there, and
        the `extend` of the first round brings that row again.
        """

    def activate(self, slots: Tensor) -> None:
        """Note that the prompts of slots [R] are prefilled: their roots and lengths are set.

        Their first round comes next: `propose` of a node alone, and `extend` with the token after it.
        """

    @makes_valid_trees
    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        """Draft after the roots of slots [B] int32, for trees of up to `budget.num_nodes` nodes.

        The engine chooses the budget for each round, and cuts each tree to its request's share: the first nodes of a
        larger tree are those of a smaller one.
        """
        return Proposal(no_candidates(slots))

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        """Follow the round that verified this proposal: lengths and roots of slots [B] are the new ones.

        `features` [M, n * H] are the target's states of all nodes, those of request b from row
        `committed.cu_seqlens[b]` on; None where no layer was asked for.
        """

    def release(self, slot: int) -> None:
        """Forget the slot's request, which is gone."""


def has_equal_shares(draft: Draft, needs: Needs) -> bool:
    """Return whether all requests get the same number of nodes: no drawn token may decide whether it is verified."""
    return draft.sampled and not needs.scored_before_draw
