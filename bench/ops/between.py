"""Time of a call between the other kernels of a decoder layer, as it runs in a model.

Calls that follow each other find their own code in the instruction caches and their parameters in the constant caches,
and one may start while the one before still runs. In a model twenty other kernels run in between, and a layer's weights
pass through the L2. A CUDA graph of LAYERS decoder layers, whose kernels are torch's and cuBLAS's, is replayed with and
without the calls; the difference is their time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import timing
from .timing import Call, Times, times_of

LAYERS = 16  # per graph, each with a call
ROUNDS = 30  # in each every graph runs twice; a median needs at least 30
MAX_ROWS = 256  # of a pass: GEMMs of more would take so long that their noise hides a call
WEIGHT_SETS = 2  # each is larger than an L2

# The layer of an 8B model.
WIDTH, INNER = 4096, 12288
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
EPS = 1e-6


@dataclass(frozen=True)
class Weights:
    """Weights of a layer: 385 MB."""

    qkv: Tensor
    attention_out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]


@cache
def weight_sets(device: torch.device) -> list[Weights]:
    """Return the weights that layers take in turn."""

    def random(outs: int, width: int) -> Tensor:
        return torch.empty(outs, width, dtype=torch.bfloat16, device=device).normal_(std=width**-0.5)

    def ones() -> Tensor:
        return torch.ones(WIDTH, dtype=torch.bfloat16, device=device)

    return [
        Weights(
            qkv=random((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
            attention_out=random(WIDTH, Q_HEADS * HEAD_DIM),
            gate_up=random(2 * INNER, WIDTH),
            down=random(WIDTH, INNER),
            norms=(ones(), ones()),
        )
        for _ in range(WEIGHT_SETS)
    ]


@dataclass(frozen=True)
class DecoderLayer:
    """The kernels of a layer but its attention. Each pass reads the same states, so that values stay what they are."""

    weights: Weights
    states: Tensor  # [rows, WIDTH]
    attended: Tensor  # [rows, Q_HEADS * HEAD_DIM]: what the attention of a model would have written
    cos_sin: tuple[Tensor, Tensor]  # [rows, 1, HEAD_DIM] each
    kv_pool: Tensor  # [rows, 2 * KV_HEADS, HEAD_DIM]
    kv_rows: Tensor  # [rows] int64

    def before(self) -> None:
        """Normalize, project to Q, K and V, rotate, and write KV."""
        cos, sin = self.cos_sin
        normed = functional.rms_norm(self.states, (WIDTH,), self.weights.norms[0], EPS)
        qkv = functional.linear(normed, self.weights.qkv).unflatten(-1, (-1, HEAD_DIM))
        qk, v = qkv.split([Q_HEADS + KV_HEADS, KV_HEADS], dim=1)
        low, high = qk.chunk(2, dim=-1)
        rotated = qk * cos + torch.cat([-high, low], dim=-1) * sin
        self.kv_pool.index_copy_(0, self.kv_rows, torch.cat([rotated[:, Q_HEADS:], v], dim=1))

    def after(self) -> None:
        """Project the attention's output, normalize, and compute the MLP, with residual additions."""
        states = self.states + functional.linear(self.attended, self.weights.attention_out)
        normed = functional.rms_norm(states, (WIDTH,), self.weights.norms[1], EPS)
        gate, up = functional.linear(normed, self.weights.gate_up).chunk(2, dim=-1)
        torch.add(states, functional.linear(functional.silu(gate) * up, self.weights.down))


@cache
def decoder_layers(device: torch.device, rows: int) -> list[DecoderLayer]:
    """Return layers that differ in their weights, for passes of this many rows."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    angles = torch.rand(rows, 1, HEAD_DIM, device=device)
    return [
        DecoderLayer(
            weights,
            states=random(rows, WIDTH),
            attended=random(rows, Q_HEADS * HEAD_DIM),
            cos_sin=(angles.cos().bfloat16(), angles.sin().bfloat16()),
            kv_pool=random(rows, 2 * KV_HEADS, HEAD_DIM),
            kv_rows=torch.randperm(rows, device=device),
        )
        for weights in weight_sets(device)
    ]


def rows_of_pass(params: Mapping[str, Any]) -> int:
    """Return the rows of a pass whose ops have these sizes, at most MAX_ROWS."""
    rows: int = math.prod(params.get(name, 1) for name in ("batch", "nodes", "rows"))
    return min(MAX_ROWS, rows)


def rewrite(inputs: Sequence[Tensor]) -> None:
    """Write contiguous tensors in place with what they hold: they are in the L2 then, as after the kernel before."""
    for tensor in inputs:
        tensor.view(torch.uint8).bitwise_or_(0)


def model(layers: Sequence[DecoderLayer], prepare: Sequence[Call], calls: Sequence[Call] | None) -> list[Call]:
    """Return the calls of a model of LAYERS layers; None: without calls of the op."""
    sequence: list[Call] = []
    for i in range(LAYERS):
        layer = layers[i % len(layers)]
        sequence += [layer.before, prepare[i % len(prepare)]]
        if calls is not None:
            sequence.append(calls[i % len(calls)])
        sequence.append(layer.after)
    return sequence


def times_between(
    layers: Sequence[DecoderLayer], prepare: Sequence[Call], ops: Sequence[Sequence[Call]]
) -> list[Times | None]:
    """Measure the time per call of each op between the kernels of layers; None for an op of slow calls.

    What a launch and a cold start cost is negligible in a call above `timing.SLOW_SECONDS`.

    Args:
        layers: they run in turn.
        prepare: what runs before each call, and without it as well: a call for each input set.
        ops: of each the same call on each input set.
    """
    timed = [i for i, calls in enumerate(ops) if not timing.is_slow(calls[0])]
    if not timed:
        return [None] * len(ops)
    graphs = [timing.capture(model(layers, prepare, calls)) for calls in (None, *(ops[i] for i in timed))]
    rounds = there_and_back(graphs)
    times: list[Times | None] = [None] * len(ops)
    for graph, i in enumerate(timed, 1):
        times[i] = times_of([(seconds[graph] - seconds[0]) / LAYERS for seconds in rounds])
    return times


def there_and_back(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[list[float]]:
    """Return for each of ROUNDS the mean seconds of each graph's two replays.

    A round replays all graphs in order and then in reverse, so that a GPU that slows down steadily slows all alike.
    """
    order = [*range(len(graphs)), *reversed(range(len(graphs)))]
    seconds = iter(timing.seconds_of([timing.replay(graphs[i]) for _ in range(ROUNDS) for i in order]))
    means = []
    for _ in range(ROUNDS):
        sums = [0.0] * len(graphs)
        for i in order:
            sums[i] += next(seconds)
        means.append([total / 2 for total in sums])
    return means
