"""Random recurrent layers and trees, and the plain recurrence along a path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import recurrent as reference
from support.trees import random_parents

INT = torch.int32
KINDS = ("gated delta", "ungated delta", "KDA", "Mamba 2")


class Rows(NamedTuple):
    """The first arguments of `tree_recurrence`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def to(self, device: torch.device) -> Rows:
        return Rows(*(None if x is None else x.to(device) for x in self))

    def at(self, rows: Any) -> Rows:
        return Rows(*(None if x is None else x[rows] for x in self))


class Layer(NamedTuple):
    """Sizes of a recurrent layer."""

    kind: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def decays(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_dim) if self.kind == "KDA" else (self.value_heads,)

    def rows(self, count: int, dtype: torch.dtype = torch.float32) -> Rows:
        """Return random rows; their keys have lengths near 1, so that no state grows."""
        q, k = (torch.randn(count, self.key_heads, self.key_dim) / self.key_dim**0.5 for _ in "qk")
        g = -3 * torch.rand(count, *self.decays)
        return Rows(
            q=q.to(dtype),
            k=k.to(dtype),
            v=torch.randn(count, self.value_heads, self.value_dim).to(dtype),
            g=torch.zeros_like(g) if self.kind == "ungated delta" else g,
            beta=None if self.kind == "Mamba 2" else torch.rand(count, self.value_heads),
        )

    def state(self, num_slots: int) -> Tensor:
        return torch.randn(num_slots, self.value_heads, self.value_dim, self.key_dim)

    def records(self, num_slots: int, nodes: int) -> sd.RecurrentRecords:
        """Return records that nobody has written: NaN."""
        where = (2, num_slots, nodes)
        return sd.RecurrentRecords(
            k=torch.full((*where, self.key_heads, self.key_dim), torch.nan),
            u=torch.full((*where, self.value_heads, self.value_dim), torch.nan),
            g=torch.full((*where, *self.decays), torch.nan),
        )


def along_path(rows: Rows, nodes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last output [Hv, dv] and the state after the nodes, token by token in float64."""
    state, out = state.double(), torch.empty(0)
    for i in nodes:
        q, k, v, g, beta = (None if x is None else x.double() for x in rows.at(i))
        assert q is not None and k is not None and v is not None and g is not None
        q, k = (x.repeat_interleave(len(v) // len(x), 0) for x in (q, k))
        state, out, _ = reference.step(state, q, k, v, g, beta)
    return out, state


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_tree(nodes: int) -> tuple[list[int], Tensor]:
    """Return the parents of a random tree and its mask [nodes, 1]."""
    parents = random_parents(1, nodes)[0].tolist()
    words = [sum(1 << j for j in path_to(parents, i)) for i in range(nodes)]
    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    return parents, torch.tensor(signed, dtype=torch.int64).view(-1, 1)


def offsets(*counts: int) -> Tensor:
    return torch.tensor([0, *counts], dtype=INT).cumsum(0).to(INT)


def no_paths(num_slots: int, width: int) -> sd.PendingPaths:
    """Return pending paths of nothing, whose entries are garbage."""
    nodes = torch.full((num_slots, width), -77, dtype=INT)
    return sd.PendingPaths(nodes, torch.zeros(num_slots, dtype=INT), torch.zeros(num_slots, dtype=INT))


def on(device: torch.device, value: Any) -> Any:
    """Copy a tensor, or a tuple of tensors, to the device."""
    if isinstance(value, tuple):
        parts = [on(device, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
