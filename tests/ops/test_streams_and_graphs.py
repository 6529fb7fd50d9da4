"""Every op on CUDA: ordered on any stream, replayed in a graph with changed inputs; equal to the CPU op.

The calls are those of support/op_calls.py, and one for each op of the rings.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C, torch_ops
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.ops._op_list import native_halves, public_ops
from support.devices import HAS_CUDA
from support.op_calls import calls
from support.random_calls import each_tensor

Tensor = torch.Tensor
Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH, WIDTH, STOPS, VOCAB = 3, 4, 2, 50
CPU = torch.device("cpu")

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")


class Case(NamedTuple):
    op: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.number}"

    def inputs(self, seed: int) -> Call:
        """Return the call's arguments on the CPU."""
        if self.op in RINGS:
            torch.manual_seed(seed)
            return RINGS[self.op][0](), {}
        return calls(self.op, CPU, seed)[self.number]

    def written(self, call: Call, **stream: Any) -> list[Tensor]:
        """Run the op, and return its results and the arguments that it changes."""
        arguments, options = call
        if self.op in RINGS:
            return leaves(RINGS[self.op][1](*arguments, **stream))
        function = getattr(sd, self.op)
        result = function(*arguments, **options, **stream)
        named = inspect.signature(function).bind(*arguments, **options).arguments
        tensors = [found for name, value in named.items() for found in each_tensor(value, name)]
        changed = torch_ops._CHANGED.get(self.op, ())
        return leaves(result) + [tensor for name, tensor in tensors if name in changed]


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value] if isinstance(value, Tensor) else []


def to_cuda(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_cuda(part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = map(to_cuda, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.cuda() if isinstance(value, Tensor) else value


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def random_state() -> sd.SlotState:
    """Return the state of running slots, with two stop tokens each."""
    state = sd.make_slot_state(BATCH, 40, STOPS, like=torch.empty(0))
    state.stop_tokens.copy_(ints(0, VOCAB, BATCH, STOPS))
    for tensor in (state.seq_lens, state.remaining, state.top_k, state.stops_from, state.num_logprobs, state.max_nodes):
        tensor.copy_(ints(1, 9, BATCH))
    for tensor in (state.temperature, state.top_p, state.min_p):
        tensor.copy_(torch.rand(BATCH))
    state.seeds.copy_(torch.randint(0, 2**62, (BATCH,)))
    return state


def random_commands() -> tuple[Any, ...]:
    floats = torch.rand(3, BATCH, 1).view(torch.int32)
    ids, top_k, seeds = ints(0, VOCAB, BATCH, 3), ints(0, VOCAB, BATCH, 1), ints(0, 99, BATCH, 2)
    activations = [torch.randperm(BATCH, dtype=torch.int32)[:, None], ids, floats[0], top_k, *floats[1:], seeds]
    activations += [ints(0, 9, BATCH, 3), ints(0, VOCAB, BATCH, STOPS)]
    head = [torch.tensor([0, BATCH], dtype=torch.int32), ints(-1, BATCH, BATCH), ints(-1, BATCH, BATCH)]
    commands = torch.cat([*head, torch.cat(activations, 1).flatten()])[None]
    return commands, torch.randint(0, 99, (1,)), torch.zeros(1, dtype=torch.int64), random_state()


def apply_commands(commands: Tensor, num_applied: Tensor, started_at: Tensor, state: Any, **stream: Any) -> Any:
    slots, given_back = (torch.empty_like(state.seq_lens) for _ in range(2))
    Rings(commands, commands, num_applied, num_applied, started_at, slots, given_back, -1).apply_commands(
        state, **stream
    )
    return slots, given_back, num_applied, state


def random_results() -> tuple[Any, ...]:
    results = torch.zeros(1, _C.result_words(BATCH, WIDTH, 2, -1), dtype=torch.int32)
    accepted = sd.Accepted(ints(0, VOCAB, BATCH, WIDTH), ints(0, WIDTH, BATCH), ints(0, 9, BATCH, WIDTH))
    state = random_state()._replace(finish_reasons=ints(0, 2, BATCH), status=ints(0, 4, BATCH))
    levels = torch.tensor([3, 9], dtype=torch.int32), -torch.rand(BATCH, 9).cumsum(1), torch.tensor([-0.5, -1.5])
    clock = torch.zeros(1, dtype=torch.int64)
    return results, torch.randint(0, 99, (1,)), clock, accepted, ints(1, 9, BATCH), state, levels


def publish_results(
    results: Tensor, number: Tensor, clock: Tensor, accepted: Any, num_nodes: Tensor, state: Any, levels: Any,
    **stream: Any,
) -> Any:  # fmt: skip
    slots = torch.empty_like(state.seq_lens)
    named = dict(zip(("level_limits", "node_scores", "cuts"), levels, strict=True))
    rings = Rings(results, results, number, number, clock, slots, slots, -1)
    rings.publish_results(accepted, num_nodes, state, **named, **stream)
    return results[:, :2], results[:, 6:], number  # without the timestamps


RINGS: dict[str, Any] = {
    "apply_commands": (random_commands, apply_commands),
    "publish_results": (random_results, publish_results),
}
OPS = [op for op in public_ops() if native_halves(op)]
CASES = [*(Case(op, number) for op in OPS for number in range(len(calls(op, CPU)))), *map(Case, RINGS)]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def fill(buffers: Call, values: Call) -> None:
    for buffer, value in zip(leaves(buffers), leaves(values), strict=True):
        buffer.copy_(value)


def assert_equals_cpu(case: Case, got: list[Tensor], seed: int) -> None:
    for g, want in zip(got, case.written(case.inputs(seed)), strict=True):
        if want.dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(g.cpu(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
        elif want.dtype in (torch.float16, torch.bfloat16):
            torch.testing.assert_close(g.cpu(), want, rtol=2e-2, atol=1e-2)
        else:
            assert torch.equal(g.cpu().view(torch.uint8), want.view(torch.uint8)), "exact, float8 too"


@every_case
def test_cases_of_different_seeds_write_different_results(case: Case) -> None:
    """Otherwise a replay that ignored its changed inputs would pass."""
    first, second = (case.written(case.inputs(seed)) for seed in (0, 1))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_cuda
@every_case
@pytest.mark.parametrize("named", [False, True], ids=["current-stream", "stream-keyword"])
def test_op_runs_in_stream_order(case: Case, named: bool) -> None:
    """Inputs arrive late on a side stream: an op on any other stream would read those of seed 0."""
    buffers, late = to_cuda(case.inputs(0)), to_cuda(case.inputs(1))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        fill(buffers, late)
        if not named:
            got = [tensor.clone() for tensor in case.written(buffers)]
    if named:
        torch.cuda._sleep(100_000_000)  # work on the current stream would run after this kernel
        got = case.written(buffers, stream=side.cuda_stream)
    side.synchronize()
    assert_equals_cpu(case, got, seed=1)


@needs_cuda
@every_case
def test_op_graph_replay_reads_changed_inputs(case: Case) -> None:
    buffers = to_cuda(case.inputs(0))
    case.written(buffers)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.written(buffers)
    for seed in (1, 2, 1):
        fill(buffers, case.inputs(seed))
        graph.replay()
        assert_equals_cpu(case, got, seed)
