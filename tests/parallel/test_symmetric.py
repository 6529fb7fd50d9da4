"""Exchanges among ranks: sums in the order of ranks, fused norms with the bits of add_rms_norm, and waits that end."""

from __future__ import annotations

import mmap
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.models.layers.norm import RMSNorm
from specdec_kernels.models.layers.reduction import LocalReduction
from specdec_kernels.parallel.reductions import GroupReduction
from specdec_kernels.parallel.symmetric import Exchange, SymmetricReduction, buffer_words, clear, why_not
from support.replayed_engines import shared_memory

CAPACITY = 64
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def part(rank: int, call: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's x of a call. Sizes change from call to call, and some elements are negative zeros."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    rows, width = [(3, 16), (1, 64), (2, 7), (5, 9)][call % 4]
    x = torch.randn(rows, width, generator=generator) * 10**rank
    return torch.where(torch.rand(x.shape, generator=generator) < 0.3, -0.0, x).to(dtype)


def total(size: int, call: int, dtype: torch.dtype) -> Tensor:
    first, *others = (part(rank, call, dtype).float() for rank in range(size))
    for other in others:
        first = first + other
    return first.to(dtype)


def check_rank(rank: int, size: int, reduction: SymmetricReduction) -> None:
    """Compare the results of many calls with sums made here, bit for bit."""
    assert reduction.exchange.works()
    for call in range(12):
        dtype = DTYPES[call % 3]
        x, want = part(rank, call, dtype), total(size, call, dtype)
        if call % 4 == 3:
            assert torch.equal(reduction.gather(x), torch.cat([part(r, call, dtype) for r in range(size)], -1))
            continue
        if call % 4 == 2:
            assert torch.equal(reduction.sum(x), want)
            continue
        skipped = int(call % 8 == 4)  # a weight that is not aligned takes two launches
        weight = torch.linspace(-1, 2, x.shape[1] + skipped).to(dtype)[skipped:]
        apart = torch.full((len(x), 3, x.shape[1]), 7.0, dtype=dtype)
        residual, out = None if call % 2 else apart[:, 1].copy_(want.flip(0)), apart[:, 2] if call % 3 else None
        rows, sums = reduction.add_norm(RMSNorm(weight, 1e-5), x, residual, out)
        expected = sd.add_rms_norm(want, weight, 1e-5, residual=None if residual is None else want.flip(0))
        assert torch.equal(rows, expected[0]) and torch.equal(sums, expected[1])
        assert out is None or sums.data_ptr() == out.data_ptr()
        assert bool((apart[:, 0] == 7).all())
    assert not reduction.timed_out


def on_ranks(size: int, run: Callable[[int, SymmetricReduction], None]) -> list[int]:
    """Run a function in a process for each rank, with buffers that all of them map; return their exit codes."""
    words = buffer_words(size, CAPACITY)
    memory = torch.frombuffer(mmap.mmap(-1, size * words * 4), dtype=torch.int32).view(size, words)
    clear(memory)
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                exchange = Exchange.over(rank, [buffer.data_ptr() for buffer in memory], CAPACITY, CPU, memory)
                other = LocalReduction()
                other.size = size
                run(rank, SymmetricReduction(other, exchange, captured_only=False))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_get_the_bits_of_a_sum_in_their_order(size: int) -> None:
    assert on_ranks(size, lambda rank, reduction: check_rank(rank, size, reduction)) == [0] * size


def test_a_wait_for_a_rank_that_has_ended_sets_the_alarm_and_ends() -> None:
    def run(rank: int, reduction: SymmetricReduction) -> None:
        if rank == 1:
            return
        reduction.exchange.timeout = 0.02
        x = torch.ones(2, 8)
        assert torch.equal(reduction.sum(x.clone()), x)
        assert reduction.timed_out and reduction.exchange.alarm.tolist() == [1 + 1]
        reduction.exchange.timeout = 3600.0
        assert torch.equal(reduction.sum(x.clone()), x)  # at once

    assert on_ranks(2, run) == [0, 0]


class HostMemory:
    """A test double of `_C.PeerMemory` on the host, which notes in a file when it is closed."""

    def __init__(self, device: int | None, words: int, value: int, path: str = "") -> None:
        self.path = path or f"/proc/{os.getpid()}/fd/{os.memfd_create('buffer')}"
        with open(self.path, "r+b") as file:
            if not path:
                file.truncate(4 * words)
            self.words = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int32)
        if not path:
            clear(self.words)
        self.handle, self.address, self.is_own = self.path.ljust(64).encode(), self.words.data_ptr(), not path

    @classmethod
    def open(cls, device: int | None, handle: bytes) -> HostMemory:
        return cls(device, 0, 0, handle.decode().strip())

    def close(self) -> None:
        with open(notes, "a") as file:
            file.write("frees\n" if self.is_own else "unmaps\n")


class NotAllocated(HostMemory):
    def __init__(self, device: int | None, words: int, value: int, path: str = "") -> None:
        raise RuntimeError("out of memory")


class NotMapped(HostMemory):
    @classmethod
    def open(cls, device: int | None, handle: bytes) -> HostMemory:
        raise RuntimeError("no peer access")


class NotRun(Exchange):
    def works(self) -> bool:
        super().works()
        raise RuntimeError("no kernel image")


notes = ""


def be_rank(rank: int, folder: str, refusing: type | None) -> None:
    """Exchange tensors with two other ranks; rank 1 has `refusing` in place of its memory or of its exchange."""
    global notes
    notes = f"{folder}/notes"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    host = GroupReduction()
    own = refusing if rank == 1 and refusing is not None else object
    _C.PeerMemory = own if issubclass(own, HostMemory) else HostMemory  # type: ignore[assignment, misc]
    kind = own if issubclass(own, Exchange) else Exchange
    try:
        exchange = kind.among(host, CPU, lambda: host.sum(torch.zeros(1)) and None, 16 * CAPACITY)
    except RuntimeError as error:
        Path(f"{folder}/{rank}").write_text(str(error))
    else:
        check_rank(rank, 3, SymmetricReduction(host, exchange, captured_only=False))
        exchange.close()
    dist.destroy_process_group()


def test_ranks_map_the_buffers_of_each_other_and_free_them_last(tmp_path: Path) -> None:
    mp.start_processes(be_rank, (str(tmp_path), None), nprocs=3, start_method="fork")
    assert (tmp_path / "notes").read_text().split() == ["unmaps"] * 6 + ["frees"] * 3


@pytest.mark.parametrize(
    ("refusing", "reason", "unmapped", "freed"),
    [(NotAllocated, "out of memory", 0, 2), (NotMapped, "no peer access", 4, 3), (NotRun, "no kernel image", 6, 3)],
)
def test_no_rank_has_an_exchange_if_one_cannot_allocate_map_or_run(
    refusing: type, reason: str, unmapped: int, freed: int, tmp_path: Path
) -> None:
    mp.start_processes(be_rank, (str(tmp_path), refusing), nprocs=3, start_method="fork")
    other = "another rank cannot exchange tensors by our kernels"
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [other, reason, other]
    assert (tmp_path / "notes").read_text().split() == ["unmaps"] * unmapped + ["frees"] * freed


def test_kernels_need_2_4_or_8_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (3, 2))
    assert why_not(range(3)) == "ranks are 3, expected 2, 4 or 8"
    assert why_not(range(2)) == "" and why_not(range(3, 7)) == ""
    assert why_not(range(4)) == "cuda:3 does not reach the memory of cuda:2"


def test_an_alarm_fails_all_ranks_with_the_name_of_the_rank_that_is_late() -> None:
    sizes = _C.ReplaySizes(num_ranks=2, capacity=64, depth=2, words=4)
    memory, alarm = shared_memory(sizes), torch.zeros(1, dtype=torch.int32)
    first, second = (_C.ReplayChannel(memory, sizes, rank) for rank in range(2))
    first.watch_alarm(alarm, "has sent nothing in a reduction for 5 s")
    first.watch()
    time.sleep(0.25)
    assert not first.failure
    alarm[0] = 1 + 1
    deadline = time.monotonic() + 5
    while not second.failure and time.monotonic() < deadline:
        time.sleep(0.01)
    assert second.failure == f"rank 1 (process {os.getpid()}) has sent nothing in a reduction for 5 s"


def test_memory_of_peers_needs_a_build_with_cuda() -> None:
    if _C.cuda_version is not None:
        pytest.skip("this build has it")
    with pytest.raises(NotImplementedError, match="PeerMemory: this build of specdec_kernels has no CUDA half"):
        _C.PeerMemory(0, 16, 0)


def test_tensors_that_do_not_fit_go_to_the_other_reduction() -> None:
    class Other(LocalReduction):
        def sum(self, x: Tensor) -> Tensor:
            return x + 1

    exchange = Exchange.over(0, [0, 0], CAPACITY, CPU, None)
    for x in (torch.zeros(CAPACITY + 1, 4), torch.zeros(0, 4), torch.zeros(2, 4, dtype=torch.int32)):
        assert torch.equal(SymmetricReduction(Other(), exchange, captured_only=False).sum(x), x + 1)
    x = torch.zeros(2, 4)
    assert torch.equal(SymmetricReduction(Other(), exchange).sum(x), x + 1)  # nothing is captured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "all_reduce: rank is 2, expected 0 to 1"),
        ({"x": torch.zeros(2, 3)}, "all_reduce: x has rows of 12 bytes, expected a multiple of 16"),
        ({"capacity": 1}, "all_reduce: rows * packs is 2, expected 0 to 1"),
        ({"timeout": 0.0}, "all_reduce: timeout is 0.000000, expected above 0 and at most 3600"),
        ({"buffers": torch.zeros(1, dtype=torch.int64)}, "all_reduce: size is 1, expected 2 to 8"),
        ({"state": torch.zeros(7, dtype=torch.int32)}, "all_reduce: state has shape [7], expected [8]"),
    ],
)
def test_all_reduce_error_messages(change: dict[str, object], message: str) -> None:
    x = torch.zeros(2, 4)
    arguments = {"x": x, "buffers": torch.zeros(2, dtype=torch.int64), "state": torch.zeros(8, dtype=torch.int32)}
    arguments |= {"rank": 0, "capacity": CAPACITY, "timeout": 1.0, "out": x} | change  # type: ignore[assignment]
    with pytest.raises(ValueError) as error:
        _C.all_reduce(None, *arguments.values())  # type: ignore[call-arg]
    assert str(error.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streams_of_one_gpu_as_ranks_get_the_bits_of_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    """Each rank has a stream and a graph of 7 calls of several sizes, replayed 3 times."""
    device, capacity = torch.device("cuda"), 4096
    memory = torch.empty(size, buffer_words(size, capacity), dtype=torch.int32, device=device)
    clear(memory)
    shapes = [(1, 64), (4, 4096), (16, 512), (2, 2048), (1, 4096), (3, 1024), (2, 64)]
    parts = [[torch.randn(shape, device=device).to(dtype) for shape in shapes] for _ in range(size)]
    wants = []
    for each in zip(*parts, strict=True):
        sums = torch.zeros_like(each[0], dtype=torch.float32)
        for x in each:
            sums = sums + x.float()
        wants.append(sums.to(dtype))
    residuals = [torch.randn_like(want) for want in wants]
    weights = [torch.randn(want.shape[1], device=device).to(dtype) for want in wants]
    graphs, outs, reductions = [], [], []
    for rank in range(size):
        exchange = Exchange.over(rank, [buffer.data_ptr() for buffer in memory], capacity, device, memory)
        other = LocalReduction()
        other.size = size
        reductions.append(SymmetricReduction(other, exchange))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            results = []
            for x, weight, residual in zip(parts[rank], weights, residuals, strict=True):
                norm = RMSNorm(weight, 1e-6)
                results.append(reductions[-1].add_norm(norm, x, residual, torch.empty_like(x)))
                results.append((reductions[-1].sum(x.clone()), reductions[-1].gather(x)))
        graphs.append(graph)
        outs.append(results)
    streams = [torch.cuda.Stream() for _ in range(size)]
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for results, reduction in zip(outs, reductions, strict=True):
        assert not reduction.timed_out
        for i, want in enumerate(wants):
            rows, sums = sd.add_rms_norm(want, weights[i], 1e-6, residual=residuals[i])
            assert torch.equal(results[2 * i][0], rows) and torch.equal(results[2 * i][1], sums)
            assert torch.equal(results[2 * i + 1][0], want)
            assert torch.equal(results[2 * i + 1][1], torch.cat([each[i] for each in parts], -1))
