"""Reductions over the ranks of a process group of torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.layers.reduction import Reduction

# Newer releases of torch have another name for it.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupReduction(Reduction):
    """Sums over the ranks of a process group: NCCL's for tensors of a GPU, gloo's for the host's.

    Every rank gets the same bits. On the host, parts are added in the order of ranks in float32, whatever the size of
    a batch; a ring would add each piece of a tensor in an order of its own. On a GPU `sum` is NCCL's all-reduce, which
    a CUDA graph may capture.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def __str__(self) -> str:
        return "NCCL" if "nccl" in dist.get_backend_config(self.group) else "gloo"

    def sum(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        total: Tensor
        total, *others = (part.float() if part.is_floating_point() else part for part in self._all(x))
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(list(self._all(x)), -1)

    def _all(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors [size, *shape], as they are."""
        x = x.contiguous()
        parts = x.new_empty(self.size, x.numel())
        if x.is_cuda:
            gather_into(parts.view(-1), x.view(-1), group=self.group)
        else:  # gloo does not know all dtypes, and bytes are what is wanted
            dist.all_gather(list(parts.view(torch.uint8)), x.view(-1).view(torch.uint8), group=self.group)
        return parts.view(self.size, *x.shape)
