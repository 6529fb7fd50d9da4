"""Chunks of several prompts as one forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.attention import Rows
from .state import SlotState, to_device

MOST_PADDING = 0.1  # of a pass of several chunks

Chunk = tuple[int, int, list[int]]  # slot, first row, tokens: one more than rows, for the last row's successor


class Prefill(NamedTuple):
    """Chunks cut into P pieces of Q neighbouring rows, each a row of the batch with a prefix of its own.

    A layer writes the KV of all pieces before it attends, so that a piece finds those before it in its prefix.
    """

    tokens: Tensor  # [P, Q] int32; 0 where a piece is shorter
    next_tokens: Tensor  # [P, Q] int32: the successor of each
    positions: Tensor  # [P, Q] int32
    rows: Rows  # with tables, lengths and status of the pieces
    piece_slots: Tensor  # [P] int32
    slots: Tensor  # [R] int32: of the chunks
    ends: Tensor  # [R] int32: rows that these slots have then
    last_rows: Tensor  # [R] int32: the last row of each chunk, of P * Q

    @classmethod
    def of(cls, chunks: Sequence[Chunk], state: SlotState) -> Prefill:
        """What the host knows of it goes to the device in one copy, behind what is on the stream."""
        length = piece_length([len(tokens) - 1 for _, _, tokens in chunks])
        piece_slots, starts, counts, tokens = array("i"), array("i"), array("i"), array("i")
        slots, ends, last_rows = array("i"), array("i"), array("i")
        for slot, start, chunk in chunks:
            num_rows = len(chunk) - 1
            for begin in range(0, num_rows, length):
                count = min(length, num_rows - begin)
                piece_slots.append(slot)
                starts.append(start + begin)
                counts.append(count)
                tokens.extend(chunk[begin : begin + count + 1])
                tokens.extend([0] * (length - count))
            slots.append(slot)
            ends.append(start + num_rows)
            last_rows.append((len(counts) - 1) * length + counts[-1] - 1)
        parts = [piece_slots, starts, counts, slots, ends, last_rows, tokens]
        packed = to_device(sum(parts, array("i")), state.seq_lens.device)
        on_device = torch.split(packed, [len(part) for part in parts])
        piece_slots_, starts_, counts_, slots_, ends_, last_rows_, tokens_ = on_device
        tokens_ = tokens_.view(len(counts), length + 1)
        pieces, columns = (torch.arange(n, dtype=torch.int32, device=starts_.device) for n in tokens_[:, :-1].shape)
        rows = Rows(
            slots=pieces,
            page_table=state.pool.page_table[piece_slots_],
            prefix_lens=starts_,
            tail_len=length,
            num_valid=counts_,
            status=state.status[piece_slots_],
            fixed_split=state.fixed_split,
        )
        positions = starts_[:, None] + columns
        return cls(tokens_[:, :-1], tokens_[:, 1:], positions, rows, piece_slots_, slots_, ends_, last_rows_)

    def finish(self, state: SlotState) -> None:
        """All models have run it: the slots have its rows, and what was wrong with a piece is their status."""
        assert self.rows.status is not None
        state.status.scatter_reduce_(0, self.piece_slots.long(), self.rows.status, "amax")  # at least what it was
        state.seq_lens[self.slots] = self.ends


def piece_length(lengths: Sequence[int]) -> int:
    """The longest Q for which pieces of Q rows are little more than the chunks of these lengths."""
    longest, most = max(lengths), (1 + MOST_PADDING) * sum(lengths)
    powers = (1 << power for power in reversed(range(longest.bit_length())))
    return next(q for q in (longest, *powers) if sum(-(-n // q) * q for n in lengths) <= most)
