"""Prefill in one process and decode in another: the KV rows of each request move from engine to engine.

    python examples/prefill_decode_split.py "import os" "def area("

starts both on this machine. On two machines, torchrun starts one on each; docs/scale_out.md has the command.

The rows go over torch.distributed, by the host (gloo) or from GPU to GPU (nccl), or over NIXL (`pip install nixl`): its
reader fetches them by RDMA, NVLink, shared memory or TCP, as UCX finds it. The text is what one engine would write.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specdec_kernels.engine import Eagle3, Engine, ExportedRequest, SamplingParams
from specdec_kernels.tiny import tiny_model

PREFILL, DECODE = 0, 1  # ranks


class Transport(Protocol):
    """Moves one tensor of bytes; `tell` and `hear` move small objects beside it."""

    def send(self, rows: Tensor) -> None: ...
    def receive(self, num_bytes: int) -> Tensor: ...


class Distributed:
    """torch.distributed: gloo through the host, nccl from GPU to GPU."""

    def __init__(self, device: str) -> None:
        self._device = device

    def send(self, rows: Tensor) -> None:
        dist.send(rows.to(self._device), DECODE)

    def receive(self, num_bytes: int) -> Tensor:
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        dist.recv(rows, PREFILL)
        return rows


class Nixl:
    """NIXL: the decoding process reads the rows where they are."""

    def __init__(self, device: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._device = device
        self._agent = nixl_agent(f"rank{dist.get_rank()}", nixl_agent_config(backends=["UCX"]))

    def send(self, rows: Tensor) -> None:
        if rows.is_cuda:
            torch.cuda.synchronize()
        registered = self._agent.register_memory([rows])
        place = self._agent.get_serialized_descs(self._agent.get_xfer_descs([rows]))
        tell((self._agent.get_agent_metadata(), place))
        while not self._agent.check_remote_xfer_done(f"rank{DECODE}", b"read"):
            time.sleep(0)
        self._agent.deregister_memory(registered)

    def receive(self, num_bytes: int) -> Tensor:
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        registered = self._agent.register_memory([rows])
        metadata, place = hear()
        here, there = self._agent.get_xfer_descs([rows]), self._agent.deserialize_descs(place)
        reader = self._agent.initialize_xfer("READ", here, there, self._agent.add_remote_agent(metadata), b"read")
        state = self._agent.transfer(reader)
        while state == "PROC":
            time.sleep(0)
            state = self._agent.check_xfer_state(reader)
        if state != "DONE":
            raise RuntimeError(f"NIXL: the transfer is in state {state}, expected DONE")
        self._agent.release_xfer_handle(reader)
        self._agent.deregister_memory(registered)
        return rows


def tell(message: Any) -> None:
    dist.send_object_list([message], DECODE, device=torch.device("cpu"))


def hear() -> Any:
    message = [None]
    dist.recv_object_list(message, PREFILL, device=torch.device("cpu"))
    return message[0]


def send(request: ExportedRequest, transport: Transport) -> None:
    """Send a request: its values and the shapes of its tensors, then the bytes of all tensors at once."""
    # The largest elements come first, so that each tensor is aligned where it begins.
    tensors = sorted(request.tensors.items(), key=lambda item: -item[1].element_size())
    rows = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])
    tell((request.values, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors], rows.numel()))
    transport.send(rows)


def receive(transport: Transport) -> Iterator[ExportedRequest]:
    """Yield the requests that arrive, to the last one."""
    while message := hear():
        values, layout, num_bytes = message
        rows, tensors, begin = transport.receive(num_bytes), {}, 0
        for name, shape, dtype in layout:
            end = begin + shape.numel() * dtype.itemsize
            tensors[name] = rows[begin:end].view(dtype).view(shape)
            begin = end
        yield ExportedRequest(tensors, values)


def prefill(engine: Engine, transport: Transport, prompts: list[str], params: SamplingParams) -> None:
    """Prefill all prompts, and send each as soon as it has its first tokens."""
    sent, begin = 0, time.perf_counter()
    for request in engine.submit_many(prompts, params):
        try:
            exported = engine.export_request(request)
        except ValueError:  # it ended before
            print(f"prefill: {request.result().text!r} is already whole")
            continue
        send(exported, transport)
        sent += exported.num_bytes
    tell(None)
    print(f"prefill: sent {sent / 1e6:.2f} MB in {1e3 * (time.perf_counter() - begin):.0f} ms", flush=True)


def decode(engine: Engine, transport: Transport) -> None:
    """Continue each request that arrives; requests that have arrived share rounds."""
    # `trusted` lets the rows into the prefix cache: the other process is ours.
    requests = [engine.import_request(exported, trusted=True) for exported in receive(transport)]
    for request in requests:
        output = request.result()
        print(f"decode: {output.text!r} in {output.stats.rounds} rounds", flush=True)


def run(rank: int, args: argparse.Namespace) -> None:
    """Run the process of a rank."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.transport == "nccl" else "gloo", rank=rank, world_size=2)
    device = "cuda" if cuda and args.transport != "gloo" else "cpu"
    transport = Nixl(device) if args.transport == "nixl" else Distributed(device)
    draft = Eagle3(args.head, num_steps=5, topk=8, num_nodes=32)
    with Engine(args.model, draft=draft, max_len=args.max_len, num_slots=args.num_slots) as engine:
        dist.barrier()
        if rank == PREFILL:
            prefill(engine, transport, args.prompts, SamplingParams(args.max_new_tokens))
        else:
            decode(engine, transport)
    dist.destroy_process_group()


def main() -> None:
    """Run as the process that torchrun started, or start both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default=str(tiny_model("target")))
    parser.add_argument("--head", default=str(tiny_model("eagle3")))
    parser.add_argument("--transport", choices=["gloo", "nccl", "nixl"], default="gloo")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--num-slots", type=int, default=8)
    args = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), args)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.spawn(run, (args,), nprocs=2)


if __name__ == "__main__":
    main()
