"""vLLM's rejection sampling of ragged chains, and an n-gram proposer for its custom drafts.

    from specdec_kernels.compat.vllm import rejection_sample  # for vllm.v1.sample.rejection_sampler's

and `--speculative-config '{"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer",
"num_speculative_tokens": 8}'`. Neither needs vLLM to be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import _C
from ..ngram import NgramIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NgramProposer", "rejection_sample"]


def rejection_sample(
    draft_token_ids: Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """Accept the drafts of each request that rejection sampling accepts, and the token after them.

    A greedy request emits the argmax at each of its drafts (the lowest of equal ones), up to the first where that is
    another. Any other draws a coin for each draft and accepts it where coin * q < p, with p = softmax(target_logits);
    the first that is not is replaced by a draw from max(p - q, 0). Where all are accepted the bonus token follows. A
    draft out of the vocabulary, -1 in particular, is rejected. Only logits of drafts that are come to are read.

    Args:
        draft_token_ids: [tokens] int32 or int64, request after request.
        num_draft_tokens: of each request; tells whose coins a generator of `sampling_metadata` draws.
        max_spec_len: the width of the result less one; no request has more drafts.
        cu_num_draft_tokens: [bs] int32, the inclusive sums of num_draft_tokens.
        draft_probs: [tokens, V] float32, or None: each draft had all of the probability.
        target_logits: [tokens, V] float32, float16 or bfloat16, rows may be strided, temperature and filters applied. V
            is at most 2^22. A row with nothing above -inf counts as uniform.
        bonus_token_ids: [bs, 1] or [bs] int32 or int64.
        sampling_metadata: has `all_greedy`, `all_random`, `temperature` ([bs] float32, 0 for greedy requests) and
            `generators`, a dict from a request's number in the batch to its torch.Generator.
        synthetic_mode, synthetic_conditional_rates: False and None; made-up acceptance is for benchmarks.
        use_fp64_gumbel: has no effect.

    Returns:
        [bs, max_spec_len + 1] int32, -1 behind each request's tokens.

    Raises:
        ValueError: wrong dtype, shape or device; synthetic_mode.
    """
    if synthetic_mode:
        raise ValueError("rejection_sample: synthetic_mode is True, expected False")
    tokens, batch, device = len(draft_token_ids), len(cu_num_draft_tokens), target_logits.device
    greedy = sampling_metadata.all_greedy
    coins = torch.empty(tokens + batch, device=device)
    if not greedy:
        coins.uniform_()
        starts = np.cumsum([0, *num_draft_tokens]).tolist()
        for request, generator in sampling_metadata.generators.items():
            coins[starts[request] : starts[request + 1]].uniform_(generator=generator)
            coins[tokens + request : tokens + request + 1].uniform_(generator=generator)
    temperature = None
    if not greedy:
        # Requests that are said to be random are, whatever their temperature says.
        random = sampling_metadata.all_random or sampling_metadata.temperature is None
        temperature = torch.ones(batch, device=device) if random else sampling_metadata.temperature
    out = torch.empty(batch, max_spec_len + 1, dtype=torch.int32, device=device)
    _C.rejection_sample(
        None,
        draft_token_ids.int(),
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        bonus_token_ids.reshape(batch).int(),
        temperature,
        coins[:tokens],
        coins[tokens:],
        out,
    )
    return out


class NgramProposer:
    """Drafts from an `NgramIndex` over the text of all requests, as a custom proposer of vLLM.

    vLLM names no requests: a row of its batch whose text goes on is the same request, one whose text does not is
    another. Text of requests that are gone stays findable until newer text takes its place.

    Args:
        vllm_config: read are `speculative_config.num_speculative_tokens`, `.prompt_lookup_min` (the shortest match
            drafted from; 1 without it), `model_config.max_model_len` and `scheduler_config.max_num_seqs`.
        max_tokens: text that the index holds.
    """

    def __init__(self, vllm_config: Any, *, max_tokens: int = 1 << 20) -> None:
        speculation = vllm_config.speculative_config
        self.num_speculative_tokens: int = speculation.num_speculative_tokens
        self.min_match: int = getattr(speculation, "prompt_lookup_min", None) or 0
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self._num_slots: int = vllm_config.scheduler_config.max_num_seqs
        self.index = NgramIndex(max_tokens, self._num_slots, self.max_model_len)
        self._texts: NDArray[np.int32] = np.empty((self._num_slots, self.max_model_len), np.int32)
        self._lengths = [0] * self._num_slots

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
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled) and i < self._num_slots]
        lengths = [min(int(num_tokens_no_spec[i]), self.max_model_len) for i in rows]
        for i, length in zip(rows, lengths, strict=True):
            self._continue(i, token_ids_cpu[i, :length])
        if not rows:
            return drafts
        tree, _, _ = self.index.draft(
            np.array(rows, np.int32),
            np.array(lengths, np.int32),
            min(self.num_speculative_tokens + 1, 256),
            mode="chain",
            min_match=self.min_match,
        )
        for place, (i, length) in enumerate(zip(rows, lengths, strict=True)):
            count = min(int(tree.num_nodes[place]) - 1, self.max_model_len - length)
            drafts[i] = tree.tokens[place, 1 : 1 + max(count, 0)].tolist()
        return drafts

    def _continue(self, row: int, text: NDArray[np.int32]) -> None:
        """The row's stream becomes `text`: by what is new of it, or from the start where it is another's."""
        known, length = self._lengths[row], len(text)
        if known > length or not np.array_equal(self._texts[row, :known], text[:known]):
            self.index.release(row)
            known = 0
        self._texts[row, known:length] = text[known:]
        self._lengths[row] = length
        if length > known:
            self.index.insert(self._texts[row, known:length], row)
