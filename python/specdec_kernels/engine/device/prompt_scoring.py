"""Scores the tokens of prompts in prefill passes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...models.language_model import LanguageModel
from ...ops import Accepted, score_tokens
from ..host_tensors import to_device
from ..prompt_scores import PromptScores, ScoredChunk
from .prefill import Shape

if TYPE_CHECKING:
    from ..._C import PrefillChunk

MOST_LOGITS = 1 << 24  # logits at a time: those of a long prompt, [tokens, vocabulary], would not fit


class ScoredRows(NamedTuple):
    """The rows of a pass that score the tokens that follow them, on the device."""

    rows: Tensor  # [S] int32, among the pass's P * Q
    tokens: Tensor  # [S] int32
    top_n: int  # best entries listed with each token


class ChunkScores(NamedTuple):
    """Whose the scores of a pass are: a prompt's, and how many."""

    scores: PromptScores
    num_tokens: int


def scored_rows(
    chunks: Sequence[PrefillChunk], shape: Shape, scores: Mapping[int, PromptScores], device: torch.device
) -> tuple[ScoredRows, list[ChunkScores]] | None:
    """Return the rows of a pass over these chunks that score tokens, and whose these are; None: there are none.

    Args:
        chunks: as in `pack`, which cuts them into pieces of neighboring rows.
        shape: of the pass.
        scores: of slots whose prompts are scored.
        device: of the pass.
    """
    rows, tokens, owners, first = array("i"), array("i"), [], 0
    for chunk in chunks:
        num_rows = len(chunk.tokens) - 1
        of_slot = scores.get(chunk.slot)
        count = 0 if of_slot is None else of_slot.wanted(chunk.start, num_rows)
        if of_slot is not None and count > 0:
            rows.extend(range(first, first + count))
            tokens.extend(chunk.tokens[1 : count + 1])
            owners.append(ChunkScores(of_slot, count))
        first += -(-num_rows // shape.length) * shape.length
    if not owners:
        return None
    top_n = max(owner.scores.num_top for owner in owners)
    return ScoredRows(to_device(rows, device), to_device(tokens, device), top_n), owners


def score_rows(target: LanguageModel, hidden: Tensor, scored: ScoredRows) -> Tensor:
    """Return the scores of tokens [S, 1 + 2 * top_n] int32: a log-probability, then the best ids, then theirs.

    Floats are there by their bits, so that one copy takes all to the host.

    Args:
        target: the model.
        hidden: [P * Q, H], of the pass.
        scored: the rows and their tokens.
    """
    size = max(1, MOST_LOGITS // target.lm_head.out_features)
    blocks = []
    for rows, tokens in zip(torch.split(scored.rows, size), torch.split(scored.tokens, size), strict=True):
        logits = target.logits(hidden[rows])[:, None]
        path, ones = torch.zeros_like(tokens)[:, None], torch.ones_like(tokens)
        scores = score_tokens(logits, Accepted(tokens[:, None], ones, path), top_n=scored.top_n)
        parts = scores.logprobs.view(torch.int32), scores.top_ids[:, 0], scores.top_logprobs[:, 0].view(torch.int32)
        blocks.append(torch.cat(parts, dim=1))
    return torch.cat(blocks)


def hand_out(packed: Tensor, top_n: int, owners: Sequence[ChunkScores]) -> None:
    """Start the copy of a pass's scores to the host, and give them to their prompts."""
    copied: torch.cuda.Event | None = None
    if packed.is_cuda:
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        packed = host
    for part, owner in zip(torch.split(packed, [owner.num_tokens for owner in owners]), owners, strict=True):
        logprobs, top_ids, top_logprobs = torch.split(part, [1, top_n, top_n], dim=1)
        owner.scores.add(
            ScoredChunk(logprobs[:, 0].view(torch.float32), top_ids, top_logprobs.view(torch.float32), copied)
        )
