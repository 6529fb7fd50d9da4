"""An n-gram proposer for vLLM's `custom_class` method.

    --speculative-config '{"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer",
      "num_speculative_tokens": 8}'

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ngram import NgramDraft, NgramIndex
from ...ops import Tree
from ..version_gate import QUIET
from .contracts import NGRAM_PROPOSER
from .plugin import takeover

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NgramProposer"]

TAIL = 8  # tokens that are compared to find out whether a text continues
FIRST = np.arange(TAIL)
FREE_ROWS = 64  # rows of a batch that cost no more than fewer: the smallest GEMM tile
# This many extra rows take half as long as a round, which emits some two tokens for each request: for an 8B model in
# bfloat16 on an H100, a row takes 20 us and a round of 64 requests 16 ms.
ROWS_OF_HALF_A_ROUND = 330
ACCEPTED_WITHOUT_MATCH = 0.15  # acceptance rate of a first draft without a match, in text that is no edit


class NgramProposer:
    """A custom proposer for vLLM that drafts from an `NgramIndex` over the text of all requests.

    vLLM passes no request ids, and moves requests between the rows of its batch as others end. So a text is identified
    by where it continues: in the same row if it continues that row's last text, else as the request of another row, or
    a preempted one, whose text it continues. Only the length and the last tokens are compared, and only those in a
    round without new requests. The text of finished requests can be matched until newer text overwrites it. Prefixes
    that vLLM's cache skips are read from its texts like all others.

    Each draft is one more row for the model, on which the whole batch waits, and at most one more token for one
    request. So a chain ends where its drafts are not worth their rows: with B requests, where the index expects them to
    be accepted less often than once in 1 + 330 / B, unless all requested drafts fit into 64 rows. 64 requests thus get
    drafts that are accepted at least once in six times. From 59 requests on nothing is drafted without a match; with
    fewer, a chain may continue after a token that did not match.

    A round of 64 requests takes 0.15 ms of one core (AMD EPYC, 8 drafts each), half of it for the drafts themselves.

    Args:
        vllm_config: read are `speculative_config.num_speculative_tokens`, `.prompt_lookup_min` (shortest match to draft
            from; default: any), `model_config.max_model_len`, `scheduler_config.max_num_seqs` and, if present,
            `scheduler_config.async_scheduling`.
        max_tokens: capacity of the index.

    Raises:
        ValueError: num_speculative_tokens is above 255, scheduling is asynchronous (drafts are then requested before
            the tokens that they follow are known), or the installed vLLM is an untested one that calls proposers
            otherwise.
    """

    def __init__(self, vllm_config: Any, *, max_tokens: int = 1 << 20) -> None:
        speculation, scheduling = vllm_config.speculative_config, vllm_config.scheduler_config
        self.num_speculative_tokens: int = speculation.num_speculative_tokens
        self.min_match: int = getattr(speculation, "prompt_lookup_min", None) or 0
        self.max_model_len: int = vllm_config.model_config.max_model_len
        if not 1 <= self.num_speculative_tokens <= 255:
            raise ValueError(
                f"NgramProposer: num_speculative_tokens is {self.num_speculative_tokens}, expected 1 to 255"
            )
        reason = takeover(QUIET).left.get(NGRAM_PROPOSER)
        if reason:
            raise ValueError(f"NgramProposer: this version of vLLM is not tested, and {reason}")
        if getattr(scheduling, "async_scheduling", None):
            raise ValueError("NgramProposer: async_scheduling is True, expected False (vllm: --no-async-scheduling)")
        rows: int = scheduling.max_num_seqs
        slots = 2 * rows  # half of them for preempted requests
        self.index = NgramIndex(max_tokens, slots, self.max_model_len)
        self._rows = rows
        self._slot_of = np.full(rows, -1, np.int32)  # slot of each row of the batch; -1: none yet
        self._lengths = np.zeros(slots, np.int32)  # length of each slot's text; 0: never used
        self._tails = np.full((slots, TAIL), -1, np.int32)  # last tokens of each slot's text, left-padded with -1
        self._used = np.zeros(slots, np.int64)  # the last round in which a slot had a row
        self._round = 0
        self._outputs: dict[int, NgramDraft] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain of drafts for each request; an empty one for requests that sampled nothing.

        Args:
            sampled_token_ids: tokens that each request has just sampled.
            num_tokens_no_spec: [bs], the length of each request's text, including the sampled tokens.
            token_ids_cpu: [bs, max_model_len] int32, the texts.
            slot_mappings: ignored.

        Returns:
            At most num_speculative_tokens for each request, and none beyond max_model_len.

        Raises:
            ValueError: sampled_token_ids is not a list: vLLM schedules asynchronously.
        """
        if not isinstance(sampled_token_ids, list):
            raise ValueError(
                f"NgramProposer: sampled_token_ids is a {type(sampled_token_ids).__name__}, expected a list "
                "(vllm: --no-async-scheduling)"
            )
        batch = len(sampled_token_ids)
        if batch > self._rows:
            raise ValueError(f"NgramProposer: sampled_token_ids has {batch} rows, expected at most {self._rows}")
        drafts: list[list[int]] = [[] for _ in range(batch)]
        rows = np.array([i for i, sampled in enumerate(sampled_token_ids) if sampled], np.intp)
        if not len(rows):
            return drafts
        lengths = np.minimum(num_tokens_no_spec[rows], self.max_model_len).astype(np.int32)
        self._round += 1
        slots = self._slot_of[rows]
        known = self._lengths[slots]
        near = _tokens_around(token_ids_cpu, rows, known, self.num_speculative_tokens + 1)
        goes_on = (slots >= 0) & (known <= lengths) & (near[:, :TAIL] == self._tails[slots]).all(1)
        self._used[slots[goes_on]] = self._round
        if not goes_on.all():
            for place in np.flatnonzero(~goes_on).tolist():
                slots[place] = self._slot_for(int(rows[place]), token_ids_cpu[rows[place], : lengths[place]])
            known = self._lengths[slots]
            near = _tokens_around(token_ids_cpu, rows, known, self.num_speculative_tokens + 1)
        new = lengths - known
        many = new > self.num_speculative_tokens + 1  # more than one round emits
        if many.any():
            for place in np.flatnonzero(many).tolist():
                row, length = rows[place], lengths[place]
                self.index.insert(token_ids_cpu[row, known[place] : length], int(slots[place]))
                near[place, :TAIL] = _tokens_around(token_ids_cpu, row[None], length[None], 0)
            new[many] = 0
        self.index.extend(near[:, TAIL:].copy(), new, slots)
        self._lengths[slots] = lengths
        self._tails[slots] = near.ravel().take(np.arange(0, near.size, near.shape[1])[:, None] + new[:, None] + FIRST)
        tree = self._draft(slots, lengths)
        counts = np.minimum(tree.num_nodes - 1, self.max_model_len - lengths).tolist()
        for row, tokens, count in zip(rows.tolist(), tree.tokens.tolist(), counts, strict=True):
            drafts[row] = tokens[1 : 1 + count]
        return drafts

    def _slot_for(self, row: int, text: NDArray[np.int32]) -> int:
        """Return the unused slot that holds the longest prefix of a row's text, or the least recently used."""
        free = np.flatnonzero(self._used != self._round)
        known = self._lengths[free]
        shorter = free[(known > 0) & (known <= len(text))]
        if len(shorter):
            ends = _tokens_around(text[None], np.zeros(len(shorter), np.intp), self._lengths[shorter], 0)
            shorter = shorter[(ends == self._tails[shorter]).all(1)]
        if len(shorter):
            slot = int(shorter[self._lengths[shorter].argmax()])
        else:
            slot = int(free[self._used[free].argmin()])  # evict the oldest; its text can still be matched
            self.index.release(slot)
            self._lengths[slot] = 0
        self._slot_of[self._slot_of == slot] = -1
        self._slot_of[row] = slot
        self._used[slot] = self._round
        return slot

    def _draft(self, slots: NDArray[np.int32], lengths: NDArray[np.int32]) -> Tree:
        out = self._outputs.get(len(slots))  # buffers of an earlier round with as many rows, already read
        num_nodes = min(self.num_speculative_tokens + 1, self.max_model_len)
        free = len(slots) * num_nodes <= FREE_ROWS
        min_prob = 0 if free else len(slots) / (ROWS_OF_HALF_A_ROUND + len(slots))  # acceptance that pays for a row
        min_match = max(self.min_match, 1) if min_prob > ACCEPTED_WITHOUT_MATCH else self.min_match
        out = self.index.draft(slots, lengths, num_nodes, mode="chain", min_prob=min_prob, min_match=min_match, out=out)
        self._outputs[len(slots)] = out
        return out.tree


def _tokens_around(
    texts: NDArray[np.int32], rows: NDArray[np.intp], lengths: NDArray[np.int32], new: int
) -> NDArray[np.int32]:
    """Return [len(rows), TAIL + new] tokens around `lengths`: TAIL before (-1 before the text) and `new` from there."""
    width = texts.shape[1]
    offsets = np.arange(-TAIL, new)
    if lengths.min() >= TAIL and lengths.max() + new <= width:
        around: NDArray[np.int32] = texts.ravel().take((rows * width + lengths)[:, None] + offsets)
        return around
    places = lengths[:, None] + offsets
    around = texts.ravel().take(np.clip(places, 0, width - 1) + (rows * width)[:, None])
    around[places < 0] = -1
    return around
