"""Chains of drafts by chains of MTP layers, each of the likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.models.heads.base import Features, HeadOutput
from specdec_kernels.models.heads.mtp_chain import MtpChain
from specdec_kernels.models.layers.paged_batch import PagedBatch


def drafted_after(chain: MtpChain, output: HeadOutput, num_rows: int, table: Tensor) -> tuple[list[int], Tensor]:
    """Return a token for each layer, and its logits [layers, V], after committed rows whose last has this output."""
    hidden, normed = output
    logits, ids = [chain.logits(normed)[0]], list[int]()
    slot, length = (torch.tensor([value], dtype=torch.int32) for value in (0, num_rows))
    for depth in range(1, len(chain.heads)):
        ids.append(int(logits[-1].argmax()))
        node, position = (torch.tensor([[value]], dtype=torch.int32) for value in (ids[-1], num_rows + depth - 1))
        row = PagedBatch(slot, table, length, tail_len=depth, row_offset=depth - 1)
        last, hidden = chain.step(depth, node, position, Features(hidden), row)
        logits.append(last[0])
    return [*ids, int(logits[-1].argmax())], torch.stack(logits)
