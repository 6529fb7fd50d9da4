"""Blocks of KV rows that latent attention expands to keys and values of heads, for the chunks of a prefill pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.layers.paged_batch import LatentBlock
from ..host_tensors import to_device

PAGE = 64  # rows of a page of expanded rows
BLOCK_ROWS = 4096  # of prefixes, expanded at a time


class Span(NamedTuple):
    """KV rows [begin, begin + size) of a chunk's slot."""

    begin: int
    size: int

    @property
    def pages(self) -> int:
        return -(-self.size // PAGE)


def latent_blocks(
    chunks: Sequence[Span], num_pieces: int, length: int, page_table: Tensor, page_size: int
) -> tuple[LatentBlock, ...]:
    """Return the blocks of a pass: the chunks' own rows first, then their prefixes, some of each at a time.

    Args:
        chunks: the rows of each, after its prefix.
        num_pieces: of the pass; the first ones are those that the chunks are cut into.
        length: rows of a piece.
        page_table: [num_pieces, max_pages] int32, of the pieces.
        page_size: rows of the pools' pages.
    """
    each = max(BLOCK_ROWS // len(chunks) // PAGE, 1) * PAGE
    blocks = [pack_block(chunks, chunks, num_pieces, length, page_table, page_size, is_own=True)]
    for begin in range(0, max(chunk.begin for chunk in chunks), each):
        parts = [Span(begin, min(max(chunk.begin - begin, 0), each)) for chunk in chunks]
        blocks.append(pack_block(parts, chunks, num_pieces, length, page_table, page_size, is_own=False))
    return tuple(blocks)


def pack_block(
    parts: Sequence[Span],
    chunks: Sequence[Span],
    num_pieces: int,
    length: int,
    page_table: Tensor,
    page_size: int,
    *,
    is_own: bool,
) -> LatentBlock:
    """Return the block with these rows of each chunk, which are the chunk's own or all before them."""
    rows, owners, tables, prefix_lens = (array("i") for _ in range(4))
    width, last = max(part.pages for part in parts), sum(part.pages for part in parts) - 1
    page = 0
    for part, chunk in zip(parts, chunks, strict=True):
        first_piece = len(prefix_lens)
        rows.extend(range(part.begin, part.begin + part.size))
        padding = part.pages * PAGE - part.size
        rows.extend([part.begin + part.size - 1] * padding)
        owners.extend([first_piece] * (part.size + padding))
        for begin in range(0, chunk.size, length):
            tables.extend(min(page + i, last) for i in range(width))
            prefix_lens.append(begin if is_own else part.size)
        page += part.pages
    tables.extend([0] * (num_pieces * width - len(tables)))
    prefix_lens.extend([0] * (num_pieces - len(prefix_lens)))
    sizes = [len(values) for values in (rows, owners, tables, prefix_lens)]
    packed = to_device(rows + owners + tables + prefix_lens, page_table.device)
    row, owner, table, prefixes = torch.split(packed, sizes)
    # A slot without such a page has failed: its status says so, and what it reads is dropped.
    column = torch.div(row, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    pages = page_table[owner, column].clamp(min=0)
    return LatentBlock(
        rows=pages.long() * page_size + row % page_size,
        page_table=table.view(num_pieces, width),
        prefix_lens=prefixes,
        page_size=PAGE,
        tail_len=length if is_own else 0,
    )
