"""An n-gram proposer for vLLM's custom drafts.

    --speculative-config '{"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer",
      "num_speculative_tokens": 8}'

It does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ngram import NgramDraft, NgramIndex
from ...ops import Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NgramProposer"]

TAIL = 8  # tokens that tell whether a text goes on
FIRST = np.arange(TAIL)
FREE_ROWS = 64  # of a batch: the smallest tile of a product, which takes as long for fewer
# So many rows more take as long as half a round, which emits some two tokens for each request: of an 8B model in
# bfloat16 on an H100 a row takes 20 us, a round of 64 requests 16 ms.
ROWS_OF_HALF_A_ROUND = 330
ACCEPTED_WITHOUT_MATCH = 0.15  # how often the first draft is that only goes on behind another, in text that is no edit


class NgramProposer:
    """Drafts from an `NgramIndex` over the text of all requests, as a custom proposer of vLLM.

    vLLM names no requests, and moves them among the rows of its batch as others end. Text that goes on where a row's
    last text ended is the same request; text that goes on where another row's did, or that of a request which was
    preempted, is that one, wherever it stands now. Where it ended is told by the length and by the last tokens, so that
    a round that nobody joins compares nothing else. Text of requests that are gone stays findable until newer text
    takes its place, and prefixes that the cache of vLLM skips are read from its texts as all others.

    A draft is one more row for the model, for which the whole batch waits, and may be one more token of one request. So
    chains end where their drafts are not likely enough to be worth their rows: of B requests, where the index thinks
    that they are accepted less often than one time in 1 + 330 / B, unless all that was asked for makes 64 rows at most.
    64 requests get drafts that are accepted one time in six. From 59 requests on nothing is drafted where nothing
    matches; before that a draft goes on behind a token that was another.

    A round of 64 requests takes 0.15 ms of one core (AMD EPYC, 8 drafts each), half of it for the drafts themselves.

    Args:
        vllm_config: read are `speculative_config.num_speculative_tokens`, `.prompt_lookup_min` (the shortest match
            drafted from; any without it), `model_config.max_model_len`, `scheduler_config.max_num_seqs` and, where it
            is there, `scheduler_config.async_scheduling`.
        max_tokens: text that the index holds.

    Raises:
        ValueError: more than 255 num_speculative_tokens; asynchronous scheduling, with which drafts are asked for
            before the tokens are known that they follow.
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
        if getattr(scheduling, "async_scheduling", None):
            raise ValueError("NgramProposer: async_scheduling is True, expected False (vllm: --no-async-scheduling)")
        rows: int = scheduling.max_num_seqs
        slots = 2 * rows  # as many again for requests that were preempted
        self.index = NgramIndex(max_tokens, slots, self.max_model_len)
        self._rows = rows
        self._slot_of = np.full(rows, -1, np.int32)  # of each row of the batch; -1 for none yet
        self._lengths = np.zeros(slots, np.int32)  # of each slot's text; 0 for a slot that never had one
        self._tails = np.full((slots, TAIL), -1, np.int32)  # its last tokens, -1 in front of shorter texts
        self._used = np.zeros(slots, np.int64)  # the round in which a slot last had a row
        self._round = 0
        self._outputs: dict[int, NgramDraft] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain of drafts for each request; none for those that sampled nothing.

        Args:
            sampled_token_ids: of each request, what it has just sampled.
            num_tokens_no_spec: [bs], the length of each request's text, sampled tokens included.
            token_ids_cpu: [bs, max_model_len] int32, the texts.
            slot_mappings: has no effect.

        Returns:
            At most num_speculative_tokens for each request, and none beyond max_model_len.

        Raises:
            ValueError: sampled_token_ids is no list: vLLM schedules asynchronously.
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
        many = new > self.num_speculative_tokens + 1  # not what a round emits
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
        """The slot that has the longest beginning of a row's text, of those that no row has yet; else an empty one."""
        free = np.flatnonzero(self._used != self._round)
        known = self._lengths[free]
        shorter = free[(known > 0) & (known <= len(text))]
        if len(shorter):
            ends = _tokens_around(text[None], np.zeros(len(shorter), np.intp), self._lengths[shorter], 0)
            shorter = shorter[(ends == self._tails[shorter]).all(1)]
        if len(shorter):
            slot = int(shorter[self._lengths[shorter].argmax()])
        else:
            slot = int(free[self._used[free].argmin()])  # the oldest one ends; its text stays findable
            self.index.release(slot)
            self._lengths[slot] = 0
        self._slot_of[self._slot_of == slot] = -1
        self._slot_of[row] = slot
        self._used[slot] = self._round
        return slot

    def _draft(self, slots: NDArray[np.int32], lengths: NDArray[np.int32]) -> Tree:
        out = self._outputs.get(len(slots))  # of earlier rounds of as many rows, which are read by now
        num_nodes = min(self.num_speculative_tokens + 1, self.max_model_len)
        free = len(slots) * num_nodes <= FREE_ROWS
        worth = 0 if free else len(slots) / (ROWS_OF_HALF_A_ROUND + len(slots))  # how often drafts have to be accepted
        min_match = max(self.min_match, 1) if worth > ACCEPTED_WITHOUT_MATCH else self.min_match
        out = self.index.draft(slots, lengths, num_nodes, mode="chain", min_prob=worth, min_match=min_match, out=out)
        self._outputs[len(slots)] = out
        return out.tree


def _tokens_around(
    texts: NDArray[np.int32], rows: NDArray[np.intp], lengths: NDArray[np.int32], new: int
) -> NDArray[np.int32]:
    """[len(rows), TAIL + new] tokens of rows of texts: those before lengths, -1 before the first, and those from it."""
    width = texts.shape[1]
    offsets = np.arange(-TAIL, new)
    if lengths.min() >= TAIL and lengths.max() + new <= width:
        around: NDArray[np.int32] = texts.ravel().take((rows * width + lengths)[:, None] + offsets)
        return around
    places = lengths[:, None] + offsets
    around = texts.ravel().take(np.clip(places, 0, width - 1) + (rows * width)[:, None])
    around[places < 0] = -1
    return around
