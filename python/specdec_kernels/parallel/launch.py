"""The start of ranks: torchrun started them all, or rank 0 starts the others.

The ranks of an engine are processes of one host, each with a GPU of its own, or all on the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from .. import _C
from ..models.layers.reduction import Reduction
from ..models.shard import Shard
from .ranks import Ranks, expect_alive
from .reductions import GroupReduction
from .symmetric import SECONDS, SymmetricReduction, reduction_among

RING_BYTES = 8 << 20  # of records that the slowest rank has not read
# Ranks load at their own pace before they first need each other.
LOADING = datetime.timedelta(minutes=60)
COLLECTIVE = datetime.timedelta(minutes=2)  # that a rank waits for another one afterwards
SECONDS_TO_START = 300.0  # until a rank has imported what it needs
SECONDS_TO_END = 20.0  # until a rank that was closed has ended
GRACE = 2.0  # seconds after a failure, in which ranks end by themselves
logger = logging.getLogger(__name__)
# The code of a started process: it finds modules where rank 0 does.
WORKER = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from specdec_kernels.engine.worker import main
main()
"""


class Place(NamedTuple):
    """The place of this process among the ranks.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
        by_torchrun: all ranks run the same script; otherwise rank 0 starts the others.
    """

    rank: int
    size: int
    by_torchrun: bool

    @property
    def shard(self) -> Shard:
        """Return this rank's share of the model."""
        return Shard(self.rank, self.size)

    def device(self, given: str | torch.device | None, default: torch.device) -> torch.device:
        """Return the device of this rank, where `given` is that of the option: on CUDA, one GPU for each rank.

        Raises:
            ValueError: the host has fewer GPUs than ranks.
        """
        device = default if given is None else torch.device(given)
        if device.type != "cuda":
            return device
        first = device.index if device.index is not None else 0 if self.by_torchrun else torch.cuda.current_device()
        count = torch.cuda.device_count()
        if first + self.size > count:
            raise ValueError(f"Engine: tp is {self.size}, expected at most {count - first} (GPUs from cuda:{first} on)")
        return torch.device("cuda", first + self.rank)


def place_of(tp: int | None, env: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place among the ranks of an engine; None for an engine of one process.

    Args:
        tp: the engine's option.
        env: the environment, where torchrun says which rank a process is.

    Raises:
        ValueError: torchrun started another number of processes, or some on another host.
    """
    if tp is None or tp == 1:
        return None
    if "TORCHELASTIC_RUN_ID" not in env:
        return Place(0, tp, by_torchrun=False)
    world, local = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    if world != tp or local != world:
        raise ValueError(f"Engine: tp is {tp}, expected {world} (processes of torchrun, {local} of them on this host)")
    return Place(int(env["RANK"]), tp, by_torchrun=True)


@dataclass
class Memory:
    """The memory of a channel: an anonymous file, which goes with the last process that has it.

    Attributes:
        path: where the processes of this user find it, as long as rank 0 has it open.
        sizes: of the channel.
    """

    path: Path
    sizes: _C.ReplaySizes

    @classmethod
    @contextlib.contextmanager
    def create(cls, sizes: _C.ReplaySizes) -> Iterator[Memory]:
        """Create the memory on rank 0, and keep it open for the others meanwhile.

        Raises:
            OSError: there is no room.
        """
        descriptor = os.memfd_create("specdec")
        try:
            os.posix_fallocate(descriptor, 0, sizes.bytes)
            yield cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), sizes)
        finally:
            os.close(descriptor)

    def channel(self, rank: int) -> _C.ReplayChannel:
        """Return the channel of a rank, which holds the memory."""
        with self.path.open("r+b", buffering=0) as file:
            mapped = mmap.mmap(file.fileno(), self.sizes.bytes)
        return _C.ReplayChannel(torch.frombuffer(mapped, dtype=torch.int64), self.sizes, rank)


class Joining(NamedTuple):
    """The message from rank 0 to a rank that it has started.

    Attributes:
        rank: of the process.
        path: of the channel's memory.
        sizes: of the channel, the arguments of `ReplaySizes`.
        port: of rank 0's store.
        parent: rank 0's process.
        work: pickled: what the rank is to do.
    """

    rank: int
    path: str
    sizes: dict[str, int]
    port: int
    parent: int
    work: bytes


def sizes_of(size: int, depth: int, words: int) -> dict[str, int]:
    """Return the sizes of the channel of `size` ranks, with `depth` rounds of results of `words` words."""
    return {"num_ranks": size, "capacity": RING_BYTES, "depth": depth, "words": words}


def open_ranks(
    place: Place,
    device: torch.device,
    sizes: Mapping[str, int],
    work: Callable[[], Any],
    *,
    agreed: Mapping[str, str],
    custom_all_reduce: bool = True,
) -> Ranks:
    """Return this rank among all, once all are there; rank 0 starts the others if torchrun has not.

    Args:
        place: of this process.
        device: of this rank.
        sizes: of the channel (`sizes_of`), the same on all ranks.
        work: returns what started ranks get, which must be picklable.
        agreed: what scripts of torchrun must give all ranks alike, by name.
        custom_all_reduce: whether our kernels may reduce, where GPUs allow it; the same on all ranks.

    Raises:
        ValueError: the work cannot be pickled; ranks of torchrun differ.
        RuntimeError: another process group exists; a rank has ended before all were there.
    """
    if place.by_torchrun:
        agreed = {**agreed, "custom_all_reduce": str(custom_all_reduce)}
        return join_torchrun(place, device, sizes, agreed, custom_all_reduce=custom_all_reduce)
    if dist.is_initialized():
        raise RuntimeError(
            "Engine: torch.distributed has a process group, expected none in a process that starts ranks (run it by "
            f"torchrun --nproc-per-node {place.size})"
        )
    try:
        pickled = pickle.dumps(work())
    except Exception as error:
        raise ValueError(
            f"Engine: model, draft or an option cannot be sent to other ranks ({error}), expected values that can be "
            f"pickled, or torchrun --nproc-per-node {place.size}, which makes them on each rank"
        ) from error
    started: list[subprocess.Popen[bytes]] = []
    try:
        with Memory.create(_C.ReplaySizes(**sizes)) as memory:
            channel = memory.channel(0)
            store = store_of(place.size, 0, is_master=True)
            for rank in range(1, place.size):
                joining = Joining(rank, str(memory.path), dict(sizes), store.port, os.getpid(), pickled)
                started.append(start_worker(joining))
            wait_for_processes(channel, place.size, started)
        channel.watch()
        wait_for_ready(store, channel, place.size)
        init_group(device, rank=0, size=place.size, store=store)
        return ranks_of(place, device, channel, started, custom_all_reduce=custom_all_reduce)
    except BaseException:
        end(started)
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        raise


def store_of(size: int, port: int, *, is_master: bool) -> TCPStore:
    """Return the store by which ranks find each other, on this host; port 0: any."""
    return TCPStore("127.0.0.1", port, size, is_master=is_master, timeout=LOADING, wait_for_workers=False)


def start_worker(joining: Joining) -> subprocess.Popen[bytes]:
    """Start a rank in a process of its own, in a session that an interrupt of this one does not reach."""
    env = {**os.environ, "TQDM_DISABLE": "1"}  # one rank's progress is enough
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, start_new_session=True, env=env)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: `wait_for_processes` finds out
        process.stdin.write(pickle.dumps(list(sys.path)) + pickle.dumps(joining))
        process.stdin.close()
    return process


def wait_for_processes(channel: _C.ReplayChannel, size: int, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have the channel.

    Raises:
        RuntimeError: a process has ended, or is late.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    while not all(channel.process(rank) for rank in range(size)):
        for rank, process in enumerate(started, 1):
            if process.poll() is not None:
                raise RuntimeError(f"Engine: rank {rank} (process {process.pid}) ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"Engine: ranks have not started within {SECONDS_TO_START:.0f} s")
        time.sleep(0.01)


def join_torchrun(
    place: Place,
    device: torch.device,
    sizes: Mapping[str, int],
    agreed: Mapping[str, str],
    *,
    custom_all_reduce: bool,
) -> Ranks:
    """Return this rank among those that torchrun has started.

    Raises:
        ValueError: the script has a process group that cannot reduce on the device, or gives ranks what differs.
    """
    is_script_group = dist.is_initialized()
    if is_script_group:
        expect_backend(device)
        use_gpu(device)
    else:
        init_group(device, rank=place.rank, size=place.size)
    control = dist.new_group(backend="gloo")  # the script's own group may be NCCL's alone
    expect_agreed(agreed, place.size, control)
    said: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            memory = stack.enter_context(Memory.create(_C.ReplaySizes(**sizes)))
            said[0] = str(memory.path)
        dist.broadcast_object_list(said, src=0, group=control, device=torch.device("cpu"))
        (path,) = said
        channel = Memory(Path(path), _C.ReplaySizes(**sizes)).channel(place.rank)
        dist.barrier(control)
    channel.watch()
    return ranks_of(
        place,
        device,
        channel,
        [],
        control,
        is_script_group=is_script_group,
        custom_all_reduce=custom_all_reduce,
    )


def expect_agreed(agreed: Mapping[str, str], size: int, group: dist.ProcessGroup) -> None:
    """Raise ValueError on all ranks if one of them has something else than rank 0."""
    each: list[Any] = [None] * size
    dist.all_gather_object(each, dict(agreed), group=group)
    for rank, own in enumerate(each):
        for name, value in each[0].items():
            if own[name] != value:
                raise ValueError(
                    f"Engine: {name} is {own[name]} on rank {rank}, expected {value} (that of rank 0: the script of "
                    "torchrun gives all ranks the same)"
                )


def attach(joining: Joining) -> _C.ReplayChannel:
    """Return the channel of a process that rank 0 has started; they watch each other from now on."""
    channel = Memory(Path(joining.path), _C.ReplaySizes(**joining.sizes)).channel(joining.rank)
    channel.watch()
    return channel


def join(joining: Joining, channel: _C.ReplayChannel, device: torch.device, *, custom_all_reduce: bool = True) -> Ranks:
    """Return the rank of a process that rank 0 has started."""
    size = joining.sizes["num_ranks"]
    store = store_of(size, joining.port, is_master=False)
    store.set(ready(joining.rank), "")
    init_group(device, rank=joining.rank, size=size, store=store)
    place = Place(joining.rank, size, by_torchrun=False)
    return ranks_of(place, device, channel, [], custom_all_reduce=custom_all_reduce)


def ready(rank: int) -> str:
    """Return the store's key that a rank sets when it is about to join the process group."""
    return f"specdec {rank} is ready"


def wait_for_ready(store: TCPStore, channel: _C.ReplayChannel, size: int) -> None:
    """Wait until the other ranks are ready to join the process group, which cannot be interrupted.

    Raises:
        RuntimeError: one of them has failed.
    """
    while not store.check([ready(rank) for rank in range(1, size)]):
        expect_alive(channel)
        time.sleep(0.01)


def init_group(device: torch.device, *, rank: int, size: int, store: TCPStore | None = None) -> None:
    """Make the process group of all ranks: gloo on the host, and NCCL on GPUs."""
    use_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LOADING)


def use_gpu(device: torch.device) -> None:
    """Make the GPU of this rank the one that this thread uses where none is named."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def expect_backend(device: torch.device) -> None:
    """Raise ValueError if the process group of torchrun's script cannot reduce tensors of the device."""
    backends, needed = dist.get_backend_config(), "nccl" if device.type == "cuda" else "gloo"
    if f"{device.type}:{needed}" not in backends.split(","):
        raise ValueError(
            f"Engine: torch.distributed has a process group with {backends}, expected {device.type}:{needed} (or none, "
            "which the engine makes)"
        )


def ranks_of(
    place: Place,
    device: torch.device,
    channel: _C.ReplayChannel,
    started: Sequence[subprocess.Popen[bytes]],
    control: dist.ProcessGroup | None = None,
    *,
    custom_all_reduce: bool,
    is_script_group: bool = False,
) -> Ranks:
    """Return a rank, and let a thread of rank 0 end the others after a failure.

    Args:
        place: of this process.
        device: of this rank.
        channel: of this rank.
        started: processes that this one has started.
        control: a group for tensors of the host; None: the default group.
        is_script_group: whether the default group is that of torchrun's script, which keeps its timeout.
        custom_all_reduce: whether our kernels may reduce.
    """
    aborts: list[Callable[[], None]] = []
    ending: threading.Thread | None = None
    if place.rank == 0:
        others = [channel.process(rank) for rank in range(1, place.size)]
        arguments = channel, others, aborts
        ending = threading.Thread(target=end_others, args=arguments, name="specdec ranks", daemon=True)
        ending.start()

    def least(value: int) -> int:
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=control)
        return int(values)

    def on_loaded() -> None:
        if not is_script_group:
            dist.distributed_c10d._set_pg_timeout(COLLECTIVE)

    def meet() -> None:
        expect_alive(channel)
        all_are_here = dist.all_reduce(torch.zeros(1), group=control, async_op=True)
        all_are_here.wait(datetime.timedelta(seconds=SECONDS_TO_END))

    reduction: Reduction = GroupReduction()
    if device.type == "cuda" and custom_all_reduce:
        reduction = reduction_among(GroupReduction(control), device, meet)
    exchange = reduction.exchange if isinstance(reduction, SymmetricReduction) else None
    if exchange is not None:
        aborts.append(exchange.abort)
        channel.watch_alarm(exchange.alarm, f"has sent nothing in a reduction for {SECONDS:.0f} s")
    logger.info("specdec_kernels: rank %d reduces by %s", place.rank, reduction)

    def wait_for_ending() -> None:
        if ending is not None and channel.failure:
            ending.join(SECONDS_TO_END)

    def on_close() -> None:
        if not channel.failure:
            atexit.unregister(wait_for_ending)
        if exchange is not None:
            exchange.close()
        end(started, SECONDS_TO_END)
        if not place.by_torchrun and dist.is_initialized():
            with contextlib.suppress(*[Exception] if channel.failure else []):
                dist.destroy_process_group()

    # An interpreter that ends while the thread is in a call to NCCL ends by SIGABRT.
    atexit.register(wait_for_ending)
    return Ranks(place.size, place.shard, reduction, channel, least, on_loaded, on_close)


def end_others(channel: _C.ReplayChannel, processes: Sequence[int], aborts: Sequence[Callable[[], None]]) -> None:
    """Wait for a failure, and end the processes that are still there then: also those that hang or are stopped.

    A collective that waits for one of them raises then. One of NCCL waits on the device, and is aborted. `aborts` end
    the waits of our kernels, at once.
    """
    while not channel.failure:
        if channel.closed:
            return
        time.sleep(0.1)
    for abort in aborts:
        with contextlib.suppress(Exception):
            abort()
    time.sleep(GRACE)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    if dist.is_initialized() and torch.cuda.is_available():
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def end(started: Sequence[subprocess.Popen[bytes]], seconds: float = 0.0) -> None:
    """Wait for processes to end, and kill those that do not in this time."""
    deadline = time.monotonic() + seconds
    for process in started:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
