"""Logits of a head whose rows are divided among ranks, and their best tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops import TopK, select_topk
from .reduction import Columns


class DividedLogits(NamedTuple):
    """This rank's columns of logits."""

    partial: Tensor  # [rows, own]
    columns: Columns

    def flatten(self, begin: int, end: int) -> DividedLogits:
        """Return the logits with dimensions of rows made one."""
        return self._replace(partial=self.partial.flatten(begin, end))

    def best(self, k: int) -> TopK:
        """Return the k best tokens of each row and their log-softmax, as `select_topk` does; ties go to the lower id.

        Ranks exchange values and ids of their own k best, and the logarithms of their sums, in place of all logits.
        """
        size, columns = self.columns.size, self.columns
        if k > columns.least:
            return select_topk(columns.sum(self.partial), k)
        ids, _ = select_topk(self.partial, k)
        values = self.partial.gather(-1, ids.long()).float()
        total = self.partial.float().logsumexp(-1, keepdim=True)
        rest = -2 * k % 4 or 4  # of whole 16 bytes, as kernels exchange them
        own = torch.cat([values, (ids + columns.own.start).view(torch.float32), total.expand(-1, rest)], -1)
        values, bits, totals = torch.split(columns.gather(own).view(len(own), size, -1), [k, k, rest], dim=-1)
        values, order = values.flatten(1).sort(stable=True, dim=-1, descending=True)
        all_ids = bits.contiguous().view(torch.int32).flatten(1)
        logprobs = values[:, :k] - totals[..., 0].logsumexp(-1, keepdim=True)
        logprobs = logprobs.clamp(max=0).masked_fill(logprobs.isnan(), -torch.inf)
        return TopK(all_ids.gather(-1, order[:, :k]), logprobs)


def best_tokens(logits: Tensor | DividedLogits, k: int, id_map: Tensor | None = None) -> TopK:
    """Return the k best tokens of each row [rows, V] and their log-softmax; see `select_topk`."""
    if isinstance(logits, DividedLogits):
        assert id_map is None  # such a head predicts all tokens of the target
        return logits.best(k)
    best: TopK = select_topk(logits, k, id_map=id_map)
    return best
