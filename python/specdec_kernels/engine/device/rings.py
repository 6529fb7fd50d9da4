"""Rings of records between host and device; csrc/round/records.h describes their words.

The scheduler writes commands and reads results in C++; kernels apply commands and publish results. Python allocates the
memory and launches the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import _C
from ...ops import Accepted, SlotState, TokenScores


@dataclass
class Rings:
    """The records in memory that host and device share, and the device's counters and slots."""

    commands: Tensor  # [depth, words] int32, on the host
    results: Tensor  # [depth, words] int32, on the host
    num_applied: Tensor  # [1] int64
    num_published: Tensor  # [1] int64
    started_at: Tensor  # [1] int64: when the last commands were applied, in ns of the device's clock
    slots: Tensor  # [max_batch] int32: of the round, then -1
    given_back: Tensor  # [num_slots] int32: slots whose pages are freed before the round, then -1
    top_n: int  # most of the best entries scored with a token

    @classmethod
    def create(
        cls, state: SlotState, *, max_batch: int, accept_width: int, num_levels: int, top_n: int, depth: int
    ) -> Rings:
        num_slots, max_stops = state.stop_tokens.shape
        device = state.stop_tokens.device

        def shared(words: int) -> Tensor:
            return torch.empty(depth, words, dtype=torch.int32, pin_memory=device.type == "cuda")

        def counter() -> Tensor:
            return torch.zeros(1, dtype=torch.int64, device=device)

        rings = cls(
            commands=shared(_C.command_words(max_batch, num_slots, max_stops)),
            results=shared(_C.result_words(max_batch, accept_width, num_levels, top_n)),
            num_applied=counter(),
            num_published=counter(),
            started_at=counter(),
            slots=torch.full((max_batch,), -1, dtype=torch.int32, device=device),
            given_back=torch.full((num_slots,), -1, dtype=torch.int32, device=device),
            top_n=top_n,
        )
        rings.reset()
        return rings

    def reset(self) -> None:
        """Discard all rounds: records do nothing, and no results are published."""
        self.commands.fill_(-1)
        self.results.zero_()
        self.num_applied.zero_()
        self.num_published.zero_()

    def apply_commands(self, state: SlotState, stream: int | None = None) -> None:
        """Apply the next record of commands to the state of slots, `slots` and `given_back`.

        First, slots given back get seq_lens, finish_reasons and status 0. Then slots to activate get their state and
        finish_reasons 0; their status stays, and gains BAD_PAGE if it is STALLED, since their prefill was not written.
        """
        _C.apply_commands(
            stream,
            self.commands,
            self.num_applied,
            self.started_at,
            state.seq_lens,
            state.root_tokens,
            state.remaining,
            state.stop_tokens,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seeds,
            state.stops_from,
            state.num_logprobs,
            state.max_nodes,
            state.finish_reasons,
            state.status,
            self.slots,
            self.given_back,
        )

    def publish_results(
        self,
        accepted: Accepted,
        num_nodes: Tensor,
        state: SlotState,
        *,
        slots: Tensor | None = None,
        scores: TokenScores | None = None,
        level_limits: Tensor | None = None,
        node_scores: Tensor | None = None,
        cuts: Tensor | None = None,
        stream: int | None = None,
    ) -> None:
        """Publish a round as the next record of results, which the host reads without waiting for the stream.

        Args:
            accepted: as `commit_tokens` left it.
            num_nodes: [B] int32, of each tree.
            state: finish_reasons, status and, with scores, num_logprobs: a request that did not ask gets none.
            slots: [B] int32; an empty row has finish reason and status 0.
            scores: from `score_tokens`.
            level_limits: [num_levels] int32, increasing: most nodes of a request at each budget level that the round is
                compared with. None: there are no levels.
            node_scores: [B, N] float32, by which trees were cut. None: a level has the first nodes of each tree, and
                its predicted gain is the observed one.
            cuts: [num_levels] float32, decreasing: the score of the worst node of each level (`allocate_nodes`).
            stream: a CUDA stream; None: the current one.
        """
        logprobs, top_ids, top_logprobs = scores or (None, None, None)
        _C.publish_results(
            stream,
            self.results,
            self.num_published,
            self.started_at,
            accepted.tokens,
            accepted.num_valid,
            num_nodes,
            state.finish_reasons,
            state.status,
            slots,
            logprobs,
            top_ids,
            top_logprobs,
            state.num_logprobs if scores else None,
            None if level_limits is None else accepted.path,
            level_limits,
            node_scores,
            cuts,
            None if node_scores is None else state.max_nodes,
        )
