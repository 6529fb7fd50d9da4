"""How many pages a GPU has room for, once everything else has taken its memory."""

from __future__ import annotations

import torch

from .graphs import capture_rounds
from .round import Round


def pages_that_fit(
    round: Round, mem_fraction: float, prefill_chunk: int, batch: int | None, stream: torch.cuda.Stream
) -> int:
    """Pages for `mem_fraction` of the GPU's memory, beside the weights, a prefill and captured rounds.

    Both are tried out, with slots that nobody holds: one largest chunk, and the round of the largest batch, whose
    memory the smaller ones share (None: nothing is captured). The pools at hand are counted as room.
    """
    state, device = round.state, stream.device
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
        positions = torch.arange(prefill_chunk, dtype=torch.int32, device=device)[None]
        rows = state.rows(nobody, state.seq_lens, tail_len=prefill_chunk)
        round.target.forward(torch.zeros_like(positions), positions, rows)
    graphs = capture_rounds(round, [batch], [round.draft.num_nodes], stream) if batch is not None else None
    free, total = torch.cuda.mem_get_info(device)
    pages = len(state.pool.free_stack)
    bytes_per_page = (round.target.pools.num_bytes + round.draft.num_pool_bytes) // pages
    room = int(mem_fraction * total) - (total - free) + pages * bytes_per_page
    del graphs
    torch.cuda.empty_cache()
    return max(room, 0) // bytes_per_page
