"""Chunks of several prompts in one forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...models.language_model import Prefilled
from ...models.layers.paged_batch import LastRows, PagedBatch, Sequences, with_gaps
from .state import EngineState

if TYPE_CHECKING:
    from ..._C import PrefillChunk

MOST_PADDING = 0.1  # of a pass of several chunks


class Shape(NamedTuple):
    """The sizes of a pass: P pieces of Q rows, cut from R chunks."""

    pieces: int
    length: int
    chunks: int

    @property
    def rows(self) -> int:
        return self.pieces * self.length

    @property
    def sizes(self) -> list[int]:
        """The sizes of the arrays that `pack` concatenates, in order."""
        return [*3 * [self.pieces], *4 * [self.chunks], self.pieces * (self.length + 1)]

    @classmethod
    def fitting(cls, lengths: Sequence[int]) -> Shape:
        """Return the shape with the longest pieces whose padding of these chunks stays below `MOST_PADDING`."""
        longest, most = max(lengths), (1 + MOST_PADDING) * sum(lengths)
        powers = (1 << power for power in reversed(range(longest.bit_length())))
        shapes = (cls(num_pieces(lengths, q), q, len(lengths)) for q in (longest, *powers))
        return next(shape for shape in shapes if shape.rows <= most)


def num_pieces(lengths: Sequence[int], length: int) -> int:
    """Return the number of pieces that chunks of these lengths are cut into."""
    return sum(-(-n // length) for n in lengths)


def pack(chunks: Sequence[PrefillChunk], shape: Shape) -> array[int]:
    """Pack what the host knows of a pass for one copy to the device.

    If the shape has room for more, pieces without rows are added, and the last chunk is repeated, without its rows.
    """
    length = shape.length
    piece_slots, starts, counts, tokens = array("i"), array("i"), array("i"), array("i")
    slots, ends, first_rows, last_rows = array("i"), array("i"), array("i"), array("i")
    for chunk in chunks:
        chunk_tokens, num_rows = chunk.tokens, len(chunk.tokens) - 1
        first_rows.append(len(counts) * length)
        for begin in range(0, num_rows, length):
            count = min(length, num_rows - begin)
            piece_slots.append(chunk.slot)
            starts.append(chunk.start + begin)
            counts.append(count)
            tokens.extend(chunk_tokens[begin : begin + count + 1])
            tokens.extend([0] * (length - count))
        slots.append(chunk.slot)
        ends.append(chunk.start + num_rows)
        last_rows.append((len(counts) - 1) * length + counts[-1] - 1)
    for of_pieces, empty in ((piece_slots, slots[-1]), (starts, 0), (counts, 0)):
        of_pieces.extend([empty] * (shape.pieces - len(of_pieces)))
    for of_chunks, more in (
        (slots, slots[-1]),
        (ends, ends[-1]),
        (first_rows, last_rows[-1] + 1),
        (last_rows, last_rows[-1]),
    ):
        of_chunks.extend([more] * (shape.chunks - len(of_chunks)))
    tokens.extend([0] * (shape.pieces * (length + 1) - len(tokens)))
    return sum([piece_slots, starts, counts, slots, ends, first_rows, last_rows, tokens], array("i"))


def chunk_sequences(
    slots: Tensor, first_rows: Tensor, last_rows: Tensor, num_rows: int, state: EngineState
) -> Sequences:
    """Return the rows of chunks [R] for recurrent layers: a chunk's pieces are neighbors, and all but the last full."""
    owners = slots.where(first_rows <= last_rows, -1)  # a repeated chunk has no rows
    owners, bounds = with_gaps(owners, first_rows, last_rows + 1, num_rows)
    return Sequences(owners, bounds, state.seq_lens, None, state.status)


class Prefill(NamedTuple):
    """Chunks cut into P pieces of Q neighboring rows, each a request of the batch with a prefix of its own.

    A layer writes the KV of all pieces before it attends, so a piece finds earlier pieces in its prefix. The last row
    of a text is the root's, whose successor is not known yet: `next_tokens` has the root itself there. What a draft
    writes for that row is written again when the first round is committed.
    """

    tokens: Tensor  # [P, Q] int32; 0 where a piece is shorter
    next_tokens: Tensor  # [P, Q] int32: the successor of each
    positions: Tensor  # [P, Q] int32
    rows: PagedBatch  # with tables, lengths and status of the pieces
    piece_slots: Tensor  # [P] int32
    slots: Tensor  # [R] int32: of the chunks
    ends: Tensor  # [R] int32: rows that these slots have then
    last_rows: Tensor  # [R] int32: the last row of each chunk, of P * Q

    @classmethod
    def of(cls, packed: Tensor, shape: Shape, state: EngineState, *, keeps_states: bool = False) -> Prefill:
        """Unpack on the device what `pack` packed, without reading it on the host, and allocate the slots' pages.

        `keeps_states`: the target has layers with a recurrent state, which read a chunk as a whole.
        """
        piece_slots, starts, counts, slots, ends, first_rows, last_rows, tokens = torch.split(packed, shape.sizes)
        tokens = tokens.view(shape.pieces, shape.length + 1)
        state.make_room_for_chunks(slots, ends)
        pieces, columns = (
            torch.arange(n, dtype=torch.int32, device=packed.device) for n in (shape.pieces, shape.length)
        )
        rows = PagedBatch(
            slots=pieces,
            page_table=state.pool.page_table[piece_slots],
            window_tables={window: pool.page_table[piece_slots] for window, pool in state.window_pools.items()},
            prefix_lens=starts,
            tail_len=shape.length,
            num_valid=counts,
            status=state.status[piece_slots],
            fixed_split=state.fixed_split,
            sequences=chunk_sequences(slots, first_rows, last_rows, shape.rows, state) if keeps_states else None,
        )
        positions = starts[:, None] + columns
        return cls(tokens[:, :-1], tokens[:, 1:], positions, rows, piece_slots, slots, ends, last_rows)

    @property
    def last(self) -> LastRows:
        """The last row of each chunk, with its piece's pages and all rows before it as prefix."""
        starts, counts = self.rows.prefix_lens, self.rows.num_valid
        assert counts is not None
        pieces = torch.div(self.last_rows, self.tokens.shape[1], rounding_mode="floor")
        before = (starts + counts - 1).clamp(min=0)
        # A piece without rows, as in the warm-up of a capture, has no last row.
        are_there = counts[pieces].clamp(max=1)
        rows = self.rows._replace(slots=pieces, prefix_lens=before, tail_len=1, num_valid=are_there)
        return LastRows(self.last_rows, before[pieces][:, None], rows)

    def finish(self, state: EngineState, states: Prefilled, last: LastRows) -> None:
        """Advance the slots after all models have run the pass, the target with these states.

        The slots get the lengths and the states of their chunks' last rows, and the status of their pieces. Pages that
        left their windows are freed.
        """
        are_there, status, pieces = last.batch.num_valid, self.rows.status, last.batch.slots
        assert are_there is not None and status is not None and states.hidden is not None
        # Rows that are absent or have no pages may hold NaN: zeros are kept instead.
        is_void = ((are_there == 0) | (status[pieces] != 0))[:, None]
        state.last_hidden[self.slots] = states.hidden.to(state.last_hidden.dtype).masked_fill(is_void, 0)
        if states.features is not None:
            features = states.features.flatten(0, 1)[last.indices]
            state.last_features[self.slots] = features.to(state.last_features.dtype).masked_fill(is_void, 0)
        state.status.scatter_reduce_(0, self.piece_slots.long(), status, "amax")  # at least what it was
        state.seq_lens[self.slots] = self.ends
        state.free_behind(self.slots)
