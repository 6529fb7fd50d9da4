"""Reductions by kernels that write to the other ranks' memory, for tensors of a few rows inside captured rounds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _C
from ..models.layers.norm import RMSNorm
from ..models.layers.reduction import Reduction
from .reductions import GroupReduction

EMPTY = 1 << 31  # a word that has not arrived: a negative zero, which no rank writes
PACK_BYTES = 16
PHASES = 3  # of a buffer, as in csrc/parallel/exchange.h
STATE_WORDS = 8
TIMED_OUT = 2  # word of the state
# Bytes of the largest tensor of a call, for the numbers of ranks that the kernels are compiled for. A rank sends its
# tensor to each of the others, which takes longer than a ring above some size.
CAPACITY_BYTES = {2: 8 << 20, 4: 2 << 20, 8: 1 << 20}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SECONDS = 5.0  # of a wait for another rank
logger = logging.getLogger(__name__)


@dataclass
class Exchange:
    """The memory through which a rank exchanges tensors with the others.

    Attributes:
        rank: of this process.
        buffers: [size] int64, the addresses of the ranks' buffers, each of `buffer_bytes`.
        state: [8] int32, of this rank.
        capacity: packs of 16 bytes that a call may send.
        alarm: [1] int32 on the host, 1 + rank once a wait for that rank has exceeded its time. Calls are without effect
            from then on.
        timeout: seconds that a kernel waits for another rank.
        memory: what keeps the buffers.
        on_close: unmaps and frees the buffers.
    """

    rank: int
    buffers: Tensor
    state: Tensor
    capacity: int
    alarm: Tensor
    timeout: float = SECONDS
    memory: Any = None
    on_close: Callable[[], None] = field(default=lambda: None)

    @classmethod
    def over(cls, rank: int, addresses: list[int], capacity: int, device: torch.device, memory: Any) -> Exchange:
        """Return the exchange of a rank over buffers that `clear` has prepared on all ranks."""
        alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        state = torch.zeros(STATE_WORDS // 2, dtype=torch.int64)
        state[3] = alarm.data_ptr()
        buffers = torch.tensor(addresses, dtype=torch.int64)
        return cls(rank, buffers.to(device), state.view(torch.int32).to(device), capacity, alarm, memory=memory)

    @classmethod
    def among(
        cls, host: GroupReduction, device: torch.device, meet: Callable[[], None], capacity_bytes: int
    ) -> Exchange:
        """Allocate this rank's buffer and map those of the others (CUDA IPC); all ranks call it together.

        Args:
            host: gathers the ranks' tensors of the host.
            device: of this rank, which reaches the memory of all others.
            meet: waits until all ranks call it; closing needs it. It raises after a failure.
            capacity_bytes: that a call may send.

        Raises:
            RuntimeError: on every rank, if one of them cannot allocate or map a buffer, or does not get what the others
                write.
        """
        capacity = -(-capacity_bytes // PACK_BYTES)
        own: _C.PeerMemory | None = None
        mapped: dict[int, _C.PeerMemory] = {}  # of the other ranks
        handle = b""

        def close() -> None:
            for memory in mapped.values():
                memory.close()
            with contextlib.suppress(RuntimeError):  # a rank has failed: none has it mapped any more
                meet()
            if own is not None:
                own.close()

        def expect_all(reason: str) -> None:
            if host.sum(torch.tensor([int(bool(reason))])):
                close()
                raise RuntimeError(reason or "another rank cannot exchange tensors by our kernels")

        def allocate() -> None:
            nonlocal own, handle
            own = _C.PeerMemory(device.index, buffer_words(host.size, capacity), EMPTY)
            handle = own.handle

        def map_others() -> None:
            for rank, theirs in enumerate(handles.tolist()):
                if rank != host.rank:
                    mapped[rank] = _C.PeerMemory.open(device.index, bytes(theirs))

        expect_all(why_failed(allocate))
        assert own is not None
        handles = host.gather(torch.tensor(list(handle), dtype=torch.uint8)).view(host.size, -1)
        expect_all(why_failed(map_others))
        memories = [own if rank == host.rank else mapped[rank] for rank in range(host.size)]
        addresses = [memory.address for memory in memories]
        exchange = cls.over(host.rank, addresses, capacity, device, memories)
        exchange.on_close = close
        arrives: list[bool] = []
        reason = why_failed(lambda: arrives.append(exchange.works()))
        expect_all(reason or ("" if all(arrives) else "what GPUs write to each other's memory does not arrive"))
        return exchange

    def works(self) -> bool:
        """Exchange a few numbers, and return whether all arrive; all ranks call it together.

        It also loads the kernels, before graphs capture them.
        """
        size, pairs = len(self.buffers), []
        for dtype in FLOATS:
            x = torch.full((2, 8), self.rank + 1, dtype=dtype, device=self.state.device)
            ranks = torch.arange(1, size + 1, device=x.device).to(dtype).repeat_interleave(8).expand(2, -1)
            total = torch.full_like(x, size * (size + 1) // 2)
            _, sums = self.sum_add_rms_norm(x, torch.ones_like(x[0]), 1.0, None, torch.empty_like(x))
            pairs += [(sums, total), (self.gather(x), ranks), (self.sum(x), total)]
        return all(torch.equal(ours, expected) for ours, expected in pairs) and not bool(self.alarm)

    def abort(self) -> None:
        """Let waits for other ranks end at once, from any thread; calls are without effect from then on."""
        self.alarm.fill_(1 + len(self.buffers))  # no rank
        # Streams of a priority are a ring: one of the rounds' own could be the stream that waits.
        with torch.cuda.stream(torch.cuda.Stream(self.state.device, priority=-1)):
            self.state[TIMED_OUT].copy_(self.alarm[0], non_blocking=True)

    def close(self) -> None:
        """Unmap and free the buffers; no graph that uses them is launched any more. All ranks call it together."""
        if self.alarm.is_pinned():
            with contextlib.suppress(RuntimeError):  # after a failure the device may be gone
                torch.cuda.synchronize(self.state.device)
        self.on_close()

    def fits(self, x: Tensor) -> bool:
        """Return whether a call may send x, once its rows are whole packs."""
        packs = x.numel() // max(x.shape[-1], 1) * -(-x.shape[-1] * x.element_size() // PACK_BYTES)
        return x.dtype in FLOATS and 0 < packs <= self.capacity

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
            out_sum: [T, H] for the sum; may be x or the residual. Its rows and the residual's may be apart.
        """
        rows = torch.empty_like(x)
        memory = self.buffers, self.state, self.rank, self.capacity, self.timeout
        _C.all_reduce_add_rms_norm(None, x, *memory, weight, eps, residual, out_sum, rows)
        return rows, out_sum


def why_failed(step: Callable[[], object]) -> str:
    """Take a step that all ranks take, and return why it has failed on this one; empty if it has not.

    A rank that raised at once would leave the others waiting for it.
    """
    try:
        step()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""


def buffer_words(size: int, capacity: int) -> int:
    """Return the 32-bit words of a rank's buffer."""
    return PHASES * size * capacity * PACK_BYTES // 4


def clear(buffer: Tensor) -> None:
    """Mark all words of a buffer as not written: negative zeros, which no rank writes."""
    buffer.fill_(EMPTY - (1 << 32))


def packed(rows: Tensor) -> Tensor:
    """Return rows [T, H] as an exchange takes them: contiguous, aligned, and with zeros up to whole packs."""
    rest = -rows.shape[1] % (PACK_BYTES // rows.element_size())
    rows = functional.pad(rows, (0, rest)) if rest else rows.contiguous()
    return rows.clone() if rows.data_ptr() % PACK_BYTES else rows


def is_aligned(rows: Tensor) -> bool:
    """Return whether the rows [T, H] are whole packs, which may be apart."""
    sizes = rows.data_ptr(), *(size * rows.element_size() for size in (rows.stride(0), rows.shape[1]))
    return rows.stride(1) == 1 and not any(size % PACK_BYTES for size in sizes)


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

    def __str__(self) -> str:
        most = self.exchange.capacity * PACK_BYTES >> 20
        return f"kernels up to {most} MiB in captured rounds, {self.other} for all else"

    @property
    def timed_out(self) -> bool:
        """Return whether a wait for another rank has exceeded its time, without synchronizing."""
        return bool(self.exchange.alarm)

    def sum(self, x: Tensor) -> Tensor:
        if not self._takes(x.reshape(1, -1)):
            return self.other.sum(x)
        return self.exchange.sum(packed(x.reshape(1, -1)))[0, : x.numel()].view(x.shape)

    def gather(self, x: Tensor) -> Tensor:
        if not self._takes(x):
            return self.other.gather(x)
        rows = packed(x.reshape(-1, x.shape[-1]))
        gathered = self.exchange.gather(rows)
        if rows.shape[1] > x.shape[-1]:
            gathered = gathered.view(len(rows), self.size, -1)[..., : x.shape[-1]]
        return gathered.reshape(*x.shape[:-1], -1)

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None, out: Tensor | None) -> tuple[Any, Tensor]:
        total = out if out is not None else residual if residual is not None else x
        fused = isinstance(norm, RMSNorm) and norm.weight.dtype == x.dtype and x.ndim == 2
        if fused and self._takes(x) and x.is_contiguous():
            operands = [x, total, norm.weight[None], *([] if residual is None else [residual])]
            if all(map(is_aligned, operands)):
                return self.exchange.sum_add_rms_norm(x, norm.weight, norm.eps, residual, total)
        return super().add_norm(norm, x, residual, out)

    def _takes(self, x: Tensor) -> bool:
        if not self.exchange.fits(x):
            return False
        return not self.captured_only or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def why_not(gpus: range) -> str:
    """Return why ranks on these GPUs cannot exchange tensors by our kernels; empty if they can."""
    if len(gpus) not in CAPACITY_BYTES:
        return f"ranks are {len(gpus)}, expected 2, 4 or 8"
    for one in gpus:
        for other in gpus:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"cuda:{one} does not reach the memory of cuda:{other}"
    return ""


def reduction_among(host: GroupReduction, device: torch.device, meet: Callable[[], None]) -> Reduction:
    """Return a rank's reduction of captured rounds on a GPU; all ranks call it together.

    Args:
        host: reduces the ranks' tensors of the host.
        device: of this rank; the ranks' GPUs follow each other.
        meet: as for `Exchange.among`.
    """
    first, group = device.index - host.rank, GroupReduction()
    reason = why_not(range(first, first + host.size))
    if not reason:
        try:
            return SymmetricReduction(group, Exchange.among(host, device, meet, CAPACITY_BYTES[host.size]))
        except RuntimeError as error:
            reason = str(error)
    if host.rank == 0:
        logger.warning("specdec_kernels: NCCL reduces in captured rounds, which is slower (%s)", reason)
    return group
