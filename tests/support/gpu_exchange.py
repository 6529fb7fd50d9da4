"""Ranks that exchange tensors among GPUs, each in a process of its own, which compares results with sums of its own."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.models.layers.norm import RMSNorm
from specdec_kernels.parallel.reductions import GroupReduction
from specdec_kernels.parallel.symmetric import SymmetricReduction, reduction_among

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [
    (1, 64),
    (3, 24),
    (1, 4096),
    (33, 4096),
    (5, 2056),
    (128, 1024),
    (7, 12288),
    (64, 5120),
    (17, 9),
    (3, 1),
    (512, 4096),
]
EPS = 1e-6


def meet() -> None:
    """Wait until all ranks call it."""
    GroupReduction().sum(torch.zeros(1))


@contextmanager
def symmetric(rank: int, size: int, folder: str) -> Iterator[SymmetricReduction]:
    """Make the reduction of an engine's rank, and take it down."""
    torch.cuda.set_device(rank)
    wait = datetime.timedelta(seconds=90)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=wait)
    reduction = reduction_among(GroupReduction(), torch.device("cuda", rank), meet)
    assert isinstance(reduction, SymmetricReduction), str(reduction)
    yield reduction
    reduction.exchange.close()
    dist.destroy_process_group()


class CapturedCalls:
    """A graph of a fused norm, a sum and a gather of tensors of one shape, whose contents change."""

    def __init__(self, reduction: SymmetricReduction, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.reduction, self.shape, self.dtype = reduction, shape, dtype
        self.rank, self.size = reduction.exchange.rank, reduction.size
        self.x, self.residual = (torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(2))
        self.parts = [self.x]
        generator = torch.Generator("cuda").manual_seed(shape[1])  # a process's own generator has a seed of its own
        self.norm = RMSNorm(torch.randn(shape[1], device="cuda", generator=generator).to(dtype), EPS)
        self.apart = torch.zeros(shape[0], 3, shape[1], dtype=dtype, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.apart[:, 1] = self.residual
            self.normed = reduction.add_norm(self.norm, self.x.clone(), self.apart[:, 1], self.apart[:, 2])
            self.sum = reduction.sum(self.x.clone())
            self.gathered = reduction.gather(self.x)

    def fill(self, seed: int) -> None:
        """Draw the parts of all ranks, the same on each of them."""
        generator = torch.Generator("cuda").manual_seed(seed)
        drawn = torch.randn(self.size + 1, *self.shape, device="cuda", generator=generator)
        zeros = torch.rand(drawn.shape, device="cuda", generator=generator) < 0.2
        self.parts = list(torch.where(zeros, -0.0, drawn).to(self.dtype))
        self.residual.copy_(self.parts.pop())
        self.x.copy_(self.parts[self.rank])

    def wrong(self) -> Tensor:
        """Return the number of elements that differ from sums in the order of ranks, or are off those in float64."""
        total, exact = (torch.zeros(self.shape, dtype=kind, device="cuda") for kind in (torch.float32, torch.float64))
        for part in self.parts:
            total, exact = total + part.float(), exact + part.double()
        total = total.to(self.dtype)
        rows, sums = sd.add_rms_norm(total, self.norm.weight, EPS, residual=self.residual)
        pairs = [(self.normed[0], rows), (self.normed[1], sums), (self.sum, total)]
        pairs.append((self.gathered, torch.cat(self.parts, -1)))
        count = torch.stack([(ours != theirs).sum() for ours, theirs in pairs]).sum()
        info = torch.finfo(self.dtype)
        eps, least = info.eps, info.smallest_normal * info.eps  # `least`: the distance of subnormal numbers
        bound = eps * torch.stack(self.parts).double().abs().sum(0) + least
        exact_sum = exact + self.residual.double()
        scale = torch.rsqrt(exact_sum.square().mean(-1, keepdim=True) + EPS) * self.norm.weight.double()
        count += ((self.sum.double() - exact).abs() > bound).sum()
        most = (
            4 * scale.abs() * (bound + eps * exact_sum.abs() + eps * exact_sum.square().mean(-1, keepdim=True).sqrt())
        ) + least
        return count + ((self.normed[0].double() - exact_sum * scale).abs() > most).sum()


def requested_bytes() -> int:
    """Return the bytes of all tensors on the GPU, without what the allocator rounds up by the block that it reuses."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def compare_sums(rank: int, folder: str, size: int, seed: int, steps: int) -> None:
    """Replay graphs of all shapes in a random order, with fresh inputs and ranks that are late at random."""
    with symmetric(rank, size, folder) as reduction:
        calls = [CapturedCalls(reduction, shape, dtype) for shape in SHAPES for dtype in DTYPES]
        for each in calls:
            each.fill(seed)
        common, own = random.Random(seed), random.Random(100 * seed + rank)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        meet()
        for step in range(steps):
            call = common.choice(calls)
            call.fill(seed + step)
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(1_000_000))
            if own.random() < 0.01:
                time.sleep(own.random() / 100)
            call.graph.replay()
            wrong += call.wrong()
            if step == steps // 2:
                torch.cuda.synchronize()
                before = requested_bytes()
        for _ in range(steps):  # without anything in between
            common.choice(calls).graph.replay()
        for call in calls:
            call.graph.replay()
            wrong += call.wrong()
        assert int(wrong) == 0, f"{int(wrong)} elements are wrong"
        assert not reduction.timed_out
        assert requested_bytes() == before
        for call in calls:  # the bits are those of the other ranks
            for out in (*call.normed, call.sum):
                bits = out.contiguous().view(torch.uint8).cpu().flatten()
                assert torch.equal(*GroupReduction().gather(bits).view(size, -1)[[0, size - 1]])


def wait_for_a_rank_that_is_late(rank: int, folder: str, size: int, aborts: bool) -> None:
    """Let rank 1 make no call: the others wait for their time, name it, and make further calls at once.

    With `aborts` the wait is ended by the host.
    """
    with symmetric(rank, size, folder) as reduction:
        reduction.exchange.timeout = 60 if aborts else 0.3
        x = torch.ones(4, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduction.sum(x.clone())
        meet()
        if rank != 1:
            for least, most in ((0.29, 3.0), (0.0, 0.2)):
                started = time.monotonic()
                for _ in range(20):
                    graph.replay()
                if aborts and least:
                    time.sleep(least)
                    assert not torch.cuda.current_stream().query()
                    reduction.exchange.abort()
                torch.cuda.synchronize()
                assert least <= time.monotonic() - started < most
            assert reduction.exchange.alarm.tolist() == [1 + (size if aborts else 1)]
        meet()
