"""Log-probabilities of a prompt's tokens, as its prefill passes compute them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .outputs import TokenLogprob


class ScoredChunk(NamedTuple):
    """Scores of neighboring tokens on their way to the host."""

    logprobs: Tensor  # [T] float32, on the host
    top_ids: Tensor  # [T, N] int32
    top_logprobs: Tensor  # [T, N] float32
    copied: torch.cuda.Event | None  # recorded after the copy; None: there was none to wait for


class PromptScores:
    """The log-probabilities of one prompt: a thread of the engine adds those of chunks, other threads read all.

    Attributes:
        num_tokens: of the prompt; the first has no log-probability.
        num_top: alternatives to each token.
    """

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self.num_tokens, self.num_top = num_tokens, num_top
        self._chunks: list[ScoredChunk] = []
        self._num_scored = 0

    @property
    def is_complete(self) -> bool:
        """Return whether all tokens are scored, or will be once the device has done what was launched."""
        return self._num_scored == self.num_tokens - 1

    def wanted(self, start: int, num_rows: int) -> int:
        """Return how many of these rows of the text, from the first on, score tokens of the prompt that have no score.

        A prompt is scored once: if the request loses its slot and is prefilled again, the scores stay. A prefill that
        begins again before all are there replaces them.
        """
        if self.is_complete:
            return 0
        if start == 0:
            self._chunks, self._num_scored = [], 0
        return max(min(num_rows, self.num_tokens - 1 - start), 0)

    def add(self, chunk: ScoredChunk) -> None:
        """Add the scores of the tokens after those that have been added."""
        self._chunks.append(chunk)
        self._num_scored += len(chunk.logprobs)

    def read(self) -> list[TokenLogprob | None]:
        """Return the log-probabilities of all tokens, once complete; wait for the device. None for the first token."""
        scores: list[TokenLogprob | None] = [None]
        for chunk in self._chunks:
            if chunk.copied is not None:
                chunk.copied.synchronize()
            count = self.num_top
            ids, tops = chunk.top_ids[:, :count].tolist(), chunk.top_logprobs[:, :count].tolist()
            for own, of_ids, of_tops in zip(chunk.logprobs.tolist(), ids, tops, strict=True):
                scores.append(TokenLogprob(own, list(zip(of_ids, of_tops, strict=True))))
        return scores
