"""Reductions by kernels that write to the other ranks' memory, for tensors of a few rows inside captured rounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..models.layers.norm import RMSNorm
from ..models.layers.reduction import Reduction

PACK_BYTES = 16
PHASES = 3  # of a buffer, as in csrc/parallel/exchange.h
STATE_WORDS = 8
CAPACITY_BYTES = 2 << 20  # of one call's tensor; above it NCCL's bandwidth wins
SIZES = (2, 4, 8)  # numbers of ranks that the kernels are compiled for
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SECONDS = 5.0  # of a wait for another rank


@dataclass
class Exchange:
    """The memory through which a rank exchanges tensors with the others.

    Attributes:
        rank: of this process.
        buffers: [size] int64, the addresses of the ranks' buffers, each of `buffer_bytes`.
        state: [8] int32, of this rank.
        capacity: packs of 16 bytes that a call may send.
        alarm: [1] int32 on the host, 1 once a wait has exceeded its time. Calls are without effect from then on.
        timeout: seconds that a kernel waits for another rank.
        memory: what keeps the buffers.
    """

    rank: int
    buffers: Tensor
    state: Tensor
    capacity: int
    alarm: Tensor
    timeout: float = SECONDS
    memory: Any = None

    @classmethod
    def over(cls, rank: int, addresses: list[int], capacity: int, device: torch.device, memory: Any) -> Exchange:
        """Return the exchange of a rank over buffers that `clear` has prepared on all ranks."""
        alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        state = torch.zeros(STATE_WORDS // 2, dtype=torch.int64)
        state[3] = alarm.data_ptr()
        buffers = torch.tensor(addresses, dtype=torch.int64)
        return cls(rank, buffers.to(device), state.view(torch.int32).to(device), capacity, alarm, memory=memory)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, device: torch.device, capacity_bytes: int = CAPACITY_BYTES) -> Exchange:
        """Allocate the buffers in torch's symmetric memory; all ranks of the group call it together."""
        # It must be set before torch first asks: NVLink multicast is not used.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch.distributed import _symmetric_memory

        capacity = -(-capacity_bytes // PACK_BYTES)
        buffer = _symmetric_memory.empty(buffer_words(group.size(), capacity), dtype=torch.int32, device=device)
        clear(buffer)
        handle = _symmetric_memory.rendezvous(buffer, group)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # all buffers are clear
        torch.cuda.synchronize(device)
        return cls.over(group.rank(), list(handle.buffer_ptrs), capacity, device, (buffer, handle))

    def fits(self, x: Tensor) -> bool:
        """Return whether a call may send x."""
        row_bytes = x.shape[-1] * x.element_size()
        size = x.numel() * x.element_size()
        return x.dtype in FLOATS and row_bytes % PACK_BYTES == 0 and 0 < size <= self.capacity * PACK_BYTES

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of x [T, H], added in float32 in the order of ranks, written over x."""
        _C.all_reduce(None, x, self.buffers, self.state, self.rank, self.capacity, self.timeout, x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the ranks' x [T, H] next to each other, [T, size * H]. Negative zeros become zeros."""
        out = x.new_empty(len(x), len(self.buffers) * x.shape[1])
        _C.all_gather(None, x, self.buffers, self.state, self.rank, self.capacity, self.timeout, out)
        return out

    def sum_add_rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out_sum: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `add_rms_norm` does for the sum of the ranks' x [T, H], with the same bits.

        Args:
            x: this rank's part.
            weight: [H] of the norm.
            eps: added to the mean square.
            residual: [T, H], added to the sum; None: nothing.
            out_sum: [T, H] for the sum; may be x or the residual.
        """
        rows = torch.empty_like(x)
        memory = self.buffers, self.state, self.rank, self.capacity, self.timeout
        _C.all_reduce_add_rms_norm(None, x, *memory, weight, eps, residual, out_sum, rows)
        return rows, out_sum


def buffer_words(size: int, capacity: int) -> int:
    """Return the 32-bit words of a rank's buffer."""
    return PHASES * size * capacity * PACK_BYTES // 4


def clear(buffer: Tensor) -> None:
    """Mark all words of a buffer as not written: negative zeros, which no rank writes."""
    buffer.fill_(-(2**31))


class SymmetricReduction(Reduction):
    """Exchanges small tensors by kernels of our own, and all others by another reduction.

    Args:
        other: for tensors that do not fit, and for those outside captured graphs: a kernel waits a few seconds for
            another rank, which while loading may need minutes.
        exchange: of this rank.
        captured_only: whether kernels run in captured graphs alone.
    """

    def __init__(self, other: Reduction, exchange: Exchange, *, captured_only: bool = True) -> None:
        self.other, self.exchange, self.captured_only = other, exchange, captured_only
        self.size = other.size

    @property
    def timed_out(self) -> bool:
        """Return whether a wait for another rank has exceeded its time, without synchronizing."""
        return bool(self.exchange.alarm)

    def sum(self, x: Tensor) -> Tensor:
        if not self._takes(x):
            return self.other.sum(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.exchange.sum(rows).view(x.shape)

    def gather(self, x: Tensor) -> Tensor:
        if not self._takes(x):
            return self.other.gather(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.exchange.gather(rows).view(*x.shape[:-1], -1)

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Any, Tensor]:
        total = out if out is not None else residual if residual is not None else x
        operands = (x, total) if residual is None else (x, total, residual)
        fused = isinstance(norm, RMSNorm) and norm.weight.dtype == x.dtype and x.ndim == 2
        if not (fused and self._takes(x) and all(rows.is_contiguous() for rows in operands)):
            return super().add_norm(norm, x, residual, out)
        return self.exchange.sum_add_rms_norm(x, norm.weight, norm.eps, residual, total)

    def _takes(self, x: Tensor) -> bool:
        if not self.exchange.fits(x):
            return False
        return not self.captured_only or (x.is_cuda and torch.cuda.is_current_stream_capturing())
