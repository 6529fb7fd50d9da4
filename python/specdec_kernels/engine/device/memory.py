"""Sizes KV pools by the GPU memory that everything else leaves."""

from __future__ import annotations

import math
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

import torch

from ... import _C
from ..drafts.composition import pools_of
from ..host_tensors import to_device
from .executor import Executor
from .latent_blocks import BLOCK_ROWS
from .prefill import MOST_PADDING, Shape, pack
from .prompt_scoring import ScoredRows


def pages_that_fit(executor: Executor, mem_fraction: float, prefill_chunk: int) -> int:
    """Return the pages that fit into `mem_fraction` of the GPU's memory next to what is there and a largest prefill.

    The prefill runs on slots without requests, which it leaves as they were. The present pools count as free memory.

    It runs in a thread of its own. cuBLAS has a workspace for each handle and stream (32 MiB on Hopper), and torch
    gives the handle of a thread that has ended to the next one that needs one: the scheduler's.
    """
    state, device = executor.state, executor.state.seq_lens.device
    stream = torch.cuda.current_stream(device)

    def run() -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():
            largest_prefill(executor, prefill_chunk)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    pools = executor.target.pools, *pools_of(executor.draft)
    room = int(mem_fraction * total) - (total - free) + sum(each.num_bytes for each in pools)
    num_slots, max_pages = state.pool.page_table.shape
    counts = range(1, num_slots * max_pages + 1)
    return bisect_right(counts, room, key=lambda count: sum(each.bytes_with(count) for each in pools))


def largest_prefill(executor: Executor, prefill_chunk: int) -> None:
    """Run the most rows that a pass can have, padding included, on slots without pages, and score all tokens.

    Nothing is written.

    It is launched call by call, since captured passes have their memory already.
    """
    state = executor.state
    rows, longest = math.ceil((1 + MOST_PADDING) * prefill_chunk), int(state.max_seq_lens[0]) - 1
    lengths = [min(longest, rows - start) for start in range(0, rows, longest)][: len(state.seq_lens)]
    shape = Shape.fitting(lengths)
    chunks = [_C.PrefillChunk(slot=slot, start=0, tokens=[0] * (n + 1)) for slot, n in enumerate(lengths)]
    packed = pack(chunks, shape)
    device = state.seq_lens.device
    all_rows = torch.arange(shape.rows, dtype=torch.int32, device=device)
    scored = ScoredRows(all_rows, torch.zeros_like(all_rows), executor.round.rings.top_n)
    # Latent attention also expands rows of prefixes, which these chunks do not have.
    expanded = executor.passes.expanded(
        [_C.PrefillChunk(slot=chunk.slot, start=BLOCK_ROWS, tokens=chunk.tokens) for chunk in chunks]
    )
    executor.passes.launch(to_device(packed, device), shape, scored, expanded)
    executor.activate(list(range(len(lengths))))
    for tensor in (state.seq_lens, state.status):
        tensor.zero_()
